//! How much there is to lay out, for whoever wants to know before.

use super::Cursor;
use crate::error::Result;
use crate::format::{Body, Id, Tree, decode_tree};
use crate::host::Client;
use crate::read::Reader;
use std::collections::HashSet;
use std::sync::atomic::Ordering;

/// Count files and their bytes: each name of a file, the bytes of each inode.
pub fn count(reader: &Reader<'_>, client: &Client, tree: Id) -> Result<()> {
    let mut links = HashSet::new();
    let mut waiting = vec![Cursor::new(tree, None)];
    while let Some(mut cursor) = waiting.pop() {
        client.check()?;
        let page = cursor.next(reader)?;
        if !cursor.is_done() {
            waiting.push(cursor);
        }
        let Tree::Entries(entries) = decode_tree(&page)? else { continue };
        for entry in entries {
            match entry.body {
                Body::Directory { tree } => waiting.push(Cursor::new(tree, None)),
                Body::File { size, .. } => {
                    client.done.files_in_all.fetch_add(1, Ordering::Relaxed);
                    if entry.link.is_none_or(|link| links.insert(link)) {
                        client.done.bytes_in_all.fetch_add(size, Ordering::Relaxed);
                    }
                }
                Body::Symlink { .. } | Body::Fifo => {}
            }
        }
    }
    Ok(())
}
