//! Between a capture and the stat cache: what is taken from it before, what is kept in it behind.

use super::Found;
use crate::error::{Error, Result};
use crate::format::{Content, Id};
use crate::host::Client;
use crate::scan::{Scan, Type};
use crate::statcache::{self, Form, Record, StatCache};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Ids in one question.
const ASKED: usize = 4_096;
/// Much older than the start of the capture must a ctime be for its file to be remembered: more than a clock tick.
const MARGIN: Duration = Duration::from_millis(50);

/// Take from the cache what it remembers, as far as the store has it.
pub fn recall(
    cache: &StatCache,
    trusted: bool,
    scan: &Scan,
    found: &mut Found,
    client: &Client,
) -> Result<()> {
    let hits = (0u32..).zip(&scan.nodes).filter_map(|(number, node)| {
        let record = (node.kind == Type::File).then(|| cache.find(node.state.inode)).flatten()?;
        match record.form {
            Form::File(content) if record.state == node.state => Some((number, content, record)),
            _ => None,
        }
    });
    let mut keep = |(node, content, record): (u32, Content, Record)| {
        found.contents[node as usize] = Some(content);
        found.attrs.extend(record.attrs.map(|id| (node, id)));
        if record.data != record.state.size {
            found.data.insert(node, record.data);
        }
    };
    if trusted {
        hits.for_each(keep);
        return Ok(());
    }
    let mut hits = hits.peekable();
    while hits.peek().is_some() {
        client.check()?;
        let some: Vec<_> = hits.by_ref().take(ASKED / 2).collect();
        let ids = |(_, content, record): &(u32, Content, Record)| {
            let content = match content {
                Content::Empty => None,
                Content::Blob(id) | Content::Paged(id) => Some(*id),
            };
            content.into_iter().chain(record.attrs)
        };
        let held = client.ask(some.iter().flat_map(ids).collect())?.recv().map_err(|_| Error::Stopped)?;
        let mut held = held.into_iter();
        for hit in some {
            let missing = held.by_ref().take(ids(&hit).count()).filter(|held| !held).count();
            if missing == 0 {
                keep(hit);
            }
        }
    }
    Ok(())
}

/// What the stat cache is written from.
pub struct Remembered {
    pub scan: Scan,
    pub found: Found,
    pub roots: Vec<Id>,
}

impl Remembered {
    /// Replace the cache at `path`; `started` is when the capture began.
    pub fn save(&self, path: &Path, started: SystemTime) -> std::io::Result<()> {
        let (scan, found) = (&self.scan, &self.found);
        let before = started.checked_sub(MARGIN).and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let before = before.map_or((0, 0), |time| (time.as_secs() as i64, time.subsec_nanos()));
        let mut nodes: Vec<u32> = (0u32..)
            .zip(&scan.nodes)
            .filter(|(number, node)| match node.kind {
                Type::File => {
                    found.contents[*number as usize].is_some()
                        && !found.followers.contains_key(number)
                        && !found.partial.contains(number)
                        && found.about(scan, *number).state.ctime < before
                }
                Type::Directory => scan.kept(*number),
                _ => false,
            })
            .map(|(number, _)| number)
            .collect();
        let inode = |node: u32| found.about(scan, node).state.inode;
        nodes.sort_unstable_by_key(|node| inode(*node));
        nodes.dedup_by_key(|node| inode(*node));
        let mut attrs: Vec<Id> = found.attrs.values().copied().collect();
        attrs.sort_unstable();
        attrs.dedup();
        let records = nodes.iter().map(|node| {
            let state = found.about(scan, *node).state;
            let (form, data) = match (scan.nodes[*node as usize].kind, found.contents[*node as usize]) {
                (Type::File, content) => {
                    let data = found.data.get(node).copied().unwrap_or(state.size);
                    (Form::File(content.unwrap_or(Content::Empty)), data)
                }
                _ => (Form::Directory(self.roots[scan.number(*node) as usize]), 0),
            };
            Record { state, data, form, attrs: found.attrs.get(node).copied() }
        });
        statcache::save(path, (scan.device, &self.roots[0]), &attrs, nodes.len(), records)
    }
}
