//! Reading many records to see which of them are damaged.

use crate::error::{Error, Result};
use crate::format::Id;
use crate::host::Client;
use crate::layout::{Options, Pool};
use crate::read::{Locate, Location, Reader};
use crate::record::Header;
use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

/// Records that a worker takes at a time.
const EACH: usize = 256;

/// Knows where the records are that are looked at; asks for others.
struct Known<'a> {
    rows: HashMap<Id, Location>,
    client: &'a Client,
}

impl Locate for Known<'_> {
    fn locate(&self, ids: &[Id]) -> Result<Vec<Option<Location>>> {
        match ids.iter().map(|id| self.rows.get(id).copied().map(Some)).collect() {
            Some(found) => Ok(found),
            None => self.client.locate(ids),
        }
    }
}

/// What a record says of itself where it is what was written, or why it is damaged.
pub type Seen = Result<Header, String>;

/// Read every record with what it is a patch of, and decode what is no blob; one answer for each row.
///
/// Progress counts records and their bytes.
pub fn verify(
    packs: OwnedFd,
    rows: &[(Id, Location)],
    options: Options,
    client: &Client,
) -> Result<Vec<Seen>> {
    let known = Known { rows: rows.iter().copied().collect(), client };
    let reader = Reader::new(packs, &known);
    let answers: Vec<OnceLock<Seen>> = rows.iter().map(|_| OnceLock::new()).collect();
    let parts =
        (0..rows.len()).step_by(EACH).rev().map(|start| start..rows.len().min(start + EACH)).collect();
    Pool::new(parts).run(options.threads(), client, |_, part: Range<usize>| {
        for at in part {
            client.check()?;
            let (id, location) = &rows[at];
            let seen = match reader.check(id, *location) {
                Err(Error::Damaged(why)) => Err(why),
                seen => Ok(seen?),
            };
            let _ = answers[at].set(seen);
            client.done.files.fetch_add(1, Ordering::Relaxed);
            client.done.bytes.fetch_add(location.length, Ordering::Relaxed);
        }
        Ok(())
    })?;
    answers.into_iter().map(|answer| answer.into_inner().ok_or(Error::Stopped)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Kind, identity};
    use crate::record::{Base, Encoder};
    use crate::testing::{MemoryStore, noise};
    use std::io::{Seek, SeekFrom, Write};

    #[test]
    fn what_is_damaged_is_named_with_what_stands_on_it() {
        let mut store = MemoryStore::new();
        let mut rows: Vec<(Id, Location)> = Vec::new();
        for seed in 0..1_000 {
            let id = store.put(Kind::Blob, &noise(seed, 500));
            rows.push((id, store.at[&id]));
        }
        let mut edited = noise(700, 500);
        edited[0] ^= 1;
        let id = identity(Kind::Blob, &edited);
        let mut record = Vec::new();
        let base = Base { id: &rows[700].0, canonical: &noise(700, 500), depth: 0 };
        assert_eq!(Encoder::new().encode(Kind::Blob, &id, &edited, Some(base), &mut record).unwrap(), 1);
        store.append(id, &record);
        rows.push((id, store.at[&id]));
        let look = |rows: &[(Id, Location)]| {
            let all = store.serve(|_, client| verify(store.directory_fd(), rows, Options::default(), client));
            let all = all.unwrap();
            assert_eq!(all.len(), rows.len());
            for (seen, (id, _)) in all.iter().zip(rows) {
                assert!(seen.as_ref().is_ok_and(|header| header.id == *id) || seen.is_err());
            }
            all.iter()
                .zip(rows)
                .filter(|(seen, _)| seen.is_err())
                .map(|(_, (id, _))| *id)
                .collect::<Vec<Id>>()
        };
        assert_eq!(look(&rows), Vec::<Id>::new());
        assert_eq!(look(&rows[1_000..]), Vec::<Id>::new(), "the base is not among the rows");
        let mut pack = std::fs::OpenOptions::new().write(true).open(store.pack_path()).unwrap();
        for at in [700, 3] {
            pack.seek(SeekFrom::Start(rows[at].1.offset + 100)).unwrap();
            pack.write_all(b"damage").unwrap();
        }
        let lost = [9; 32];
        rows.push((lost, Location { pack: 7, offset: 32, length: 100 }));
        assert_eq!(look(&rows), [rows[3].0, rows[700].0, id, lost]);
    }
}
