//! Canonical bytes out of values. Values are trusted: they come from our own scan or from a decoder.

use super::numbers::{put_block, put_svarint, put_uvarint};
use super::{Body, Commit, Content, Entry, Extent, Page, PageChild, Time, Tree, TreeChild};

fn put_time(out: &mut Vec<u8>, time: Time) {
    put_svarint(out, time.seconds);
    put_uvarint(out, u64::from(time.nanoseconds));
}

/// Append one entry of a tree of level 0, or the root of a commit.
pub fn put_entry(out: &mut Vec<u8>, entry: &Entry<'_>) {
    let kind = match entry.body {
        Body::File { .. } => 1,
        Body::Directory { .. } => 2,
        Body::Symlink { .. } => 3,
        Body::Fifo => 4,
    };
    let flags = u8::from(entry.attrs.is_some()) << 3
        | u8::from(entry.link.is_some()) << 4
        | u8::from(entry.owner.is_some()) << 5;
    out.push(kind | flags);
    put_block(out, entry.name);
    put_uvarint(out, u64::from(entry.mode));
    put_time(out, entry.mtime);
    if let Some(owner) = entry.owner {
        put_uvarint(out, u64::from(owner.uid));
        put_uvarint(out, u64::from(owner.gid));
    }
    out.extend(entry.attrs.iter().flatten());
    out.extend(entry.link.iter().flatten());
    match entry.body {
        Body::File { size, content } => {
            put_uvarint(out, size);
            match content {
                Content::Empty => {}
                Content::Blob(id) => {
                    out.push(1);
                    out.extend(id);
                }
                Content::Paged(id) => {
                    out.push(2);
                    out.extend(id);
                }
            }
        }
        Body::Directory { tree } => out.extend(tree),
        Body::Symlink { target } => put_block(out, target),
        Body::Fifo => {}
    }
}

/// Append one entry of a tree above level 0.
pub fn put_tree_child(out: &mut Vec<u8>, child: &TreeChild<'_>) {
    put_uvarint(out, child.weight);
    put_block(out, child.last);
    out.extend(child.id);
}

/// Append one entry of a page of level 0.
pub fn put_extent(out: &mut Vec<u8>, extent: &Extent) {
    put_uvarint(out, extent.length << 1 | u64::from(extent.id.is_none()));
    out.extend(extent.id.iter().flatten());
}

/// Append one entry of a page above level 0.
pub fn put_page_child(out: &mut Vec<u8>, child: &PageChild) {
    put_uvarint(out, child.weight);
    out.extend(child.id);
}

pub fn encode_tree(tree: &Tree<'_>) -> Vec<u8> {
    let mut out = vec![tree.level()];
    match tree {
        Tree::Entries(entries) => entries.iter().for_each(|entry| put_entry(&mut out, entry)),
        Tree::Children(_, children) => children.iter().for_each(|child| put_tree_child(&mut out, child)),
    }
    out
}

pub fn encode_page(page: &Page) -> Vec<u8> {
    let mut out = vec![page.level()];
    match page {
        Page::Extents(extents) => extents.iter().for_each(|extent| put_extent(&mut out, extent)),
        Page::Children(_, children) => children.iter().for_each(|child| put_page_child(&mut out, child)),
    }
    out
}

/// Extended attributes, which must be sorted by name.
pub fn encode_attrs<N: AsRef<[u8]>, V: AsRef<[u8]>>(attributes: &[(N, V)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, value) in attributes {
        put_block(&mut out, name.as_ref());
        put_block(&mut out, value.as_ref());
    }
    out
}

pub fn encode_commit(commit: &Commit<'_>) -> Vec<u8> {
    let mut out = vec![1];
    put_entry(&mut out, &commit.root);
    out.push(commit.parents.len() as u8);
    out.extend(commit.parents.iter().flatten());
    out.push(u8::from(commit.base.is_some()));
    out.extend(commit.base.iter().flatten());
    put_time(&mut out, commit.time);
    put_block(&mut out, commit.author.as_bytes());
    put_block(&mut out, commit.message.as_bytes());
    out
}
