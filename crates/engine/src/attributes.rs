//! Extended attributes of an open file or directory, as far as a commit holds them.

use crate::format::{Kind, MAX_VALUE, encode_attrs};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;

const PREFIX: &[u8] = b"user.";
/// The most that the kernel gives as a list of names.
const MAX_LIST: usize = 65_536;

#[derive(Debug, PartialEq, Eq)]
pub enum Attributes {
    None,
    /// Canonical bytes.
    Some(Vec<u8>),
    /// More than an `attrs` may hold.
    TooLarge,
}

/// Read the `user.*` attributes of `file`. `ENODATA` when one went away meanwhile.
pub fn read(file: BorrowedFd<'_>) -> Result<Attributes, Errno> {
    let mut few = [0; 512];
    let mut many = Vec::new();
    let names = match rustix::fs::flistxattr(file, &mut few) {
        Ok(length) => &few[..length],
        Err(Errno::RANGE) => {
            many.resize(MAX_LIST, 0);
            match rustix::fs::flistxattr(file, &mut many) {
                Ok(length) => &many[..length],
                Err(Errno::TOOBIG | Errno::RANGE) => return Ok(Attributes::TooLarge),
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::NOTSUP) => return Ok(Attributes::None),
        Err(errno) => return Err(errno),
    };
    let mut names: Vec<&[u8]> = names
        .split(|byte| *byte == 0)
        .filter(|name| name.starts_with(PREFIX) && name.len() > PREFIX.len())
        .collect();
    if names.is_empty() {
        return Ok(Attributes::None);
    }
    names.sort_unstable();
    let mut found = Vec::new();
    let mut bytes = 0;
    let mut value = vec![0; MAX_VALUE];
    for name in names {
        match rustix::fs::fgetxattr(file, name, &mut value) {
            Ok(length) => {
                bytes += name.len() + length;
                found.push((name, value[..length].to_vec()));
            }
            Err(Errno::RANGE | Errno::TOOBIG) => return Ok(Attributes::TooLarge),
            Err(errno) => return Err(errno),
        }
        if bytes > Kind::Attrs.max_canonical() {
            return Ok(Attributes::TooLarge);
        }
    }
    let canonical = encode_attrs(&found);
    if canonical.len() > Kind::Attrs.max_canonical() {
        return Ok(Attributes::TooLarge);
    }
    Ok(Attributes::Some(canonical))
}
