//! What is in a file: its data, without the holes, and its attributes. It may change while it is read.

use super::{Stop, Walk};
use crate::errors::{Code, Failure};
use crate::tarfmt::{MAX_EXTENDED, Records, kind, padding, xattr_key};
use crate::tarsink::{extents, sparse_map};
use rustix::fs::{OFlags, Stat, fgetxattr, flistxattr, fstat};
use rustix::io::Errno;
use std::os::fd::OwnedFd;

impl Walk {
    pub(super) fn file(&mut self, name: &[u8], seen: &Stat) -> Result<(), Stop> {
        let (file, stat) = match self.open(name, seen, OFlags::NOCTTY) {
            Ok(opened) => opened,
            // No device behind the name any more: it is not the file that was seen.
            Err(Errno::NXIO) => return self.unreadable(Errno::NOENT),
            Err(errno) => return self.unreadable(errno),
        };
        if self.linked(&stat)? {
            return Ok(());
        }
        let mut records = self.attributes(&file);
        let size = stat.st_size as u64;
        let extents =
            if (stat.st_blocks as u64).saturating_mul(512) < size { extents(&file, size) } else { None };
        let data = extents.as_ref().map_or(size, |extents| extents.iter().map(|(_, length)| length).sum());
        if data > self.max_bytes.saturating_sub(self.summary.file_bytes) {
            let limit = self.max_bytes;
            return Err(
                Failure::new(Code::TooLarge, format!("the files hold more than {limit} bytes")).into()
            );
        }
        self.summary.file_bytes += data;
        let path = self.path.clone();
        let mut whole = true;
        match extents {
            None => {
                self.write(kind::FILE, &path, b"", size, &stat, records)?;
                whole &= self.copy(&file, 0, size)?;
                self.out.zeros(padding(size))?;
            }
            Some(extents) => {
                let map = sparse_map(&extents, size);
                if !path.is_ascii() {
                    records.push(b"hdrcharset", b"BINARY");
                }
                records.push(b"GNU.sparse.major", b"1");
                records.push(b"GNU.sparse.minor", b"0");
                records.push(b"GNU.sparse.name", &path);
                records.push(b"GNU.sparse.realsize", size.to_string().as_bytes());
                let shown: Vec<u8> = [b"GNUSparseFile.0/", name]
                    .concat()
                    .iter()
                    .filter(|byte| byte.is_ascii())
                    .take(100)
                    .copied()
                    .collect();
                self.write(kind::FILE, &shown, b"", map.len() as u64 + data, &stat, records)?;
                self.out.write(&map)?;
                for (offset, length) in extents {
                    whole &= self.copy(&file, offset, length)?;
                }
                self.out.zeros(padding(data))?;
            }
        }
        if !whole || fstat(&file).is_ok_and(|now| now.st_size != stat.st_size) {
            self.skip("it changed its size while it was read");
        }
        self.remember(&stat)
    }

    /// Copy a stretch of a file; what has gone meanwhile is filled with zeros and answered by `false`.
    fn copy(&mut self, file: &OwnedFd, mut offset: u64, mut left: u64) -> Result<bool, Stop> {
        while left > 0 {
            let space = self.out.space(left)?;
            let room = space.len();
            let count = match rustix::io::pread(file, &mut *space, offset) {
                Err(Errno::INTR) => {
                    self.out.unused(room);
                    continue;
                }
                Ok(0) | Err(_) => {
                    self.out.unused(room);
                    self.out.zeros(left)?;
                    return Ok(false);
                }
                Ok(count) => count,
            };
            self.out.unused(room - count);
            offset += count as u64;
            left -= count as u64;
        }
        Ok(true)
    }

    /// The `user.*` attributes of an open file or directory.
    pub(super) fn attributes(&mut self, file: &OwnedFd) -> Records {
        let mut records = Records::default();
        let mut list = [0u8; 4_096];
        let size = match flistxattr(file, &mut list) {
            Ok(0) => return records,
            Ok(size) => size,
            Err(Errno::RANGE) => 0,
            // Not every file system has attributes.
            Err(_) => return records,
        };
        let mut longer = Vec::new();
        let list = if size > 0 {
            &list[..size]
        } else {
            longer.resize(64 << 10, 0);
            let size = flistxattr(file, &mut longer[..]).unwrap_or(0);
            &longer[..size]
        };
        let mut value = Vec::new();
        for name in list.split(|&byte| byte == 0).filter(|name| name.starts_with(b"user.")) {
            // The kernel's own limit of a value.
            value.resize(64 << 10, 0);
            let Ok(length) = fgetxattr(file, name, &mut value[..]) else {
                continue;
            };
            if records.len() + name.len() + length > MAX_EXTENDED as usize / 2 {
                self.skip("its attributes are larger than half a MiB");
                return Records::default();
            }
            records.push(&xattr_key(name), &value[..length]);
        }
        records
    }
}
