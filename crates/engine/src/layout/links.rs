//! Names that share an inode: the first that comes is made, the others are linked to it.
//!
//! Which name comes first depends on the workers. The directory of that name is held to the end, since any other may
//! turn up anywhere.

use super::dirs::Dir;
use crate::error::{Error, Result};
use crate::format::{Entry, Link, put_entry};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A name and the directory that it is in, which is held.
pub type Place = (Arc<Dir>, Box<[u8]>);

struct Group {
    /// Hash of what all names share.
    alike: blake3::Hash,
    first: Place,
    /// Names that wait for the first to be made; `None` when it was.
    waiting: Option<Vec<Place>>,
}

/// What to do with a linked name.
pub enum Claim {
    /// Make it, then say so by [`Links::made`].
    Make,
    /// Link it to this one.
    Link(Place),
    /// It will be linked by whoever makes the first.
    Wait,
}

#[derive(Default)]
pub struct Links {
    groups: Mutex<HashMap<Link, Group>>,
    /// Of a difference: groups that got a name which they did not have before.
    joined: Mutex<HashSet<Link>>,
    /// Of a difference: groups that are new from their first name on.
    whole: Mutex<HashSet<Link>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Links {
    pub fn claim(&self, link: Link, entry: &Entry<'_>, dir: &Arc<Dir>) -> Result<Claim> {
        let mut shared = Vec::new();
        put_entry(&mut shared, &Entry { name: b"", ..*entry });
        let alike = blake3::hash(&shared);
        let mut groups = lock(&self.groups);
        let Some(group) = groups.get_mut(&link) else {
            let first = (dir.hold(), entry.name.into());
            groups.insert(link, Group { alike, first, waiting: Some(Vec::new()) });
            return Ok(Claim::Make);
        };
        if group.alike != alike {
            return Err(Error::Damaged("a damaged directory: linked entries that do not agree".to_owned()));
        }
        Ok(match &mut group.waiting {
            Some(waiting) => {
                waiting.push((dir.hold(), entry.name.into()));
                Claim::Wait
            }
            None => Claim::Link((Arc::clone(&group.first.0), group.first.1.clone())),
        })
    }

    /// The first name of a group was made: these wait to be linked to it, and to be let go.
    pub fn made(&self, link: &Link) -> Vec<Place> {
        lock(&self.groups).get_mut(link).and_then(|group| group.waiting.take()).unwrap_or_default()
    }

    /// The directories that are held for first names.
    pub fn take_held(&self) -> Vec<Arc<Dir>> {
        lock(&self.groups).drain().map(|(_, group)| group.first.0).collect()
    }

    /// A name that had not this link before is laid out; `first` where the link id says that it is the first name.
    pub fn join(&self, link: Link, first: bool) {
        lock(if first { &self.whole } else { &self.joined }).insert(link);
    }

    /// Groups of which names may be in what did not change. One that is new from its first name on was nowhere before.
    pub fn take_partly_joined(&self) -> HashSet<Link> {
        let whole = std::mem::take(&mut *lock(&self.whole));
        let mut joined = std::mem::take(&mut *lock(&self.joined));
        joined.retain(|link| !whole.contains(link));
        joined
    }
}
