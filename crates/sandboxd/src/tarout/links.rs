//! Files with several names: the first one that the walk meets is written whole, the others as links to it.
//!
//! A file is forgotten with its last name, so the table holds those alone of which names are still to come, or lie outside
//! the tree. It has its share of the walk's memory.

use super::{Stop, Walk, identity};
use crate::errors::{Code, Failure};
use crate::tarfmt::{Records, kind};
use rustix::fs::Stat;

/// What the table of hard links takes for each beside the name: key, value, hash, the allocator's own.
const LINK_BYTES: usize = 96;

/// The first name of a file that has several, and how many of them are still to come.
pub struct Link {
    pub name: Box<[u8]>,
    left: u64,
}

impl Walk {
    /// Note one of a file's names.
    pub(super) fn count(&mut self, stat: &Stat) -> Result<(), Stop> {
        match self.links.get_mut(&identity(stat)) {
            None => self.remember(stat),
            Some(link) => {
                link.left -= 1;
                if link.left == 0 {
                    self.link_bytes -= link.name.len() + LINK_BYTES;
                    self.links.remove(&identity(stat));
                }
                Ok(())
            }
        }
    }

    /// A link to a name that is in the archive already; `false` when this is the file's first name.
    pub(super) fn linked(&mut self, stat: &Stat) -> Result<bool, Stop> {
        let Some(link) = self.links.get_mut(&identity(stat)) else {
            return Ok(false);
        };
        let name = link.name.clone();
        link.left -= 1;
        if link.left == 0 {
            self.links.remove(&identity(stat));
            self.link_bytes -= name.len() + LINK_BYTES;
        }
        let path = self.path.clone();
        self.write(kind::HARD_LINK, &path, &name, 0, stat, Records::default())?;
        Ok(true)
    }

    pub(super) fn remember(&mut self, stat: &Stat) -> Result<(), Stop> {
        if stat.st_nlink > 1 {
            self.link_bytes += self.path.len() + LINK_BYTES;
            if self.names + self.link_bytes > self.table_bytes {
                return Err(Failure::new(Code::Exhausted, "too many files with several names").into());
            }
            #[allow(clippy::unnecessary_cast, reason = "the field is narrower on other architectures")]
            let link = Link { name: self.path.as_slice().into(), left: stat.st_nlink as u64 - 1 };
            self.links.insert(identity(stat), link);
        }
        Ok(())
    }
}
