//! The names of a directory, read once and sorted, within the share of memory that is left.

use super::Stop;
use crate::errors::{Code, Failure};
use rustix::fs::RawDir;
use rustix::io::Errno;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

/// The names of one directory, in order.
pub struct Names {
    bytes: Vec<u8>,
    places: Vec<(u32, u32)>,
    next: usize,
}

impl Names {
    pub fn read(directory: &OwnedFd, most: usize) -> Result<Names, Stop> {
        let mut names = Names { bytes: Vec::new(), places: Vec::new(), next: 0 };
        let mut buffer = vec![MaybeUninit::uninit(); 32 << 10];
        let mut reader = RawDir::new(directory, &mut buffer);
        while let Some(item) = reader.next() {
            let item = match item {
                Ok(item) => item,
                Err(Errno::INTR) => continue,
                // The directory was removed while it was read.
                Err(Errno::NOENT) => break,
                Err(errno) => return Err(errno.into()),
            };
            let name = item.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            names.places.push((names.bytes.len() as u32, name.len() as u32));
            names.bytes.extend_from_slice(name);
            if names.size() > most {
                return Err(
                    Failure::new(Code::Exhausted, "too many names in the directories on one path").into()
                );
            }
        }
        let bytes = &names.bytes;
        names.places.sort_unstable_by(|a, b| place(bytes, *a).cmp(place(bytes, *b)));
        Ok(names)
    }

    pub fn size(&self) -> usize {
        self.bytes.len() + 8 * self.places.len()
    }

    pub fn next(&mut self) -> Option<&[u8]> {
        let name = place(&self.bytes, *self.places.get(self.next)?);
        self.next += 1;
        Some(name)
    }
}

fn place(bytes: &[u8], (start, length): (u32, u32)) -> &[u8] {
    &bytes[start as usize..][..length as usize]
}
