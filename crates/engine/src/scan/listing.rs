//! The names of one directory.

use super::Left;
use rustix::fs::RawDir;
use rustix::io::Errno;
use std::os::fd::BorrowedFd;

/// The names of one directory; its memory is used again for the next.
pub struct Listing {
    buffer: Vec<u8>,
    pub names: Vec<(u32, u8)>,
    bytes: Vec<u8>,
    /// Names that are left out, and why; without a reason they are there to hide others.
    pub left: Vec<(Vec<u8>, Option<Left>)>,
}

impl Default for Listing {
    fn default() -> Listing {
        Listing {
            buffer: Vec::with_capacity(32 << 10),
            names: Vec::new(),
            bytes: Vec::new(),
            left: Vec::new(),
        }
    }
}

impl Listing {
    pub fn name(&self, index: usize) -> &[u8] {
        let (start, length) = self.names[index];
        &self.bytes[start as usize..][..usize::from(length)]
    }

    /// Read the names of an open directory and sort them. Whether it could be read: one that was removed cannot.
    pub fn read(&mut self, directory: BorrowedFd<'_>) -> Result<bool, Errno> {
        self.names.clear();
        self.bytes.clear();
        self.left.clear();
        self.buffer.clear();
        let mut entries = RawDir::new(directory, self.buffer.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let name = match &entry {
                Ok(entry) => entry.file_name().to_bytes(),
                Err(Errno::NOENT) => return Ok(false),
                Err(errno) => return Err(*errno),
            };
            if name == b"." || name == b".." {
                continue;
            }
            let start = u32::try_from(self.bytes.len()).map_err(|_| Errno::FBIG)?;
            let Ok(length) = u8::try_from(name.len()) else {
                self.left.push((name.to_vec(), Some(Left::Name)));
                continue;
            };
            self.bytes.extend_from_slice(name);
            self.names.push((start, length));
        }
        let bytes = &self.bytes;
        let name = |(start, length): (u32, u8)| &bytes[start as usize..][..usize::from(length)];
        self.names.sort_unstable_by(|a, b| name(*a).cmp(name(*b)));
        // A name that moves meanwhile may come twice.
        Ok(self.names.windows(2).all(|pair| name(pair[0]) != name(pair[1])))
    }
}
