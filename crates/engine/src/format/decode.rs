//! Values out of canonical bytes. Everything that an encoder would not write is refused, and no list grows past a page.

use super::{
    Body, Commit, Content, Cursor, Entry, Extent, Id, Kind, MAX_AUTHOR, MAX_CHUNK, MAX_ENTRIES, MAX_LEVEL,
    MAX_MESSAGE, MAX_MODE, MAX_NAME, MAX_OWNER, MAX_PARENTS, MAX_SIZE, MAX_TARGET, MAX_VALUE, NANOSECONDS,
    Owner, Page, PageChild, SMALL_FILE, SYMLINK_MODE, Time, Tree, TreeChild,
};
use crate::error::Result;

/// Refuse more bytes than the kind allows, and begin.
fn open<'a>(kind: Kind, canonical: &'a [u8], what: &'static str) -> Result<Cursor<'a>> {
    let cursor = Cursor::new(canonical, what);
    match kind.max_canonical() {
        most if canonical.len() > most => Err(cursor.damaged(&format!("it is longer than {most} bytes"))),
        _ => Ok(cursor),
    }
}

fn usable(name: &[u8]) -> bool {
    name != b"." && name != b".." && !name.iter().any(|byte| matches!(byte, b'/' | 0))
}

fn time(cursor: &mut Cursor<'_>) -> Result<Time> {
    let seconds = cursor.svarint()?;
    let nanoseconds = cursor.uvarint(u64::from(NANOSECONDS) - 1)? as u32;
    Ok(Time { seconds, nanoseconds })
}

fn owner(cursor: &mut Cursor<'_>) -> Result<Owner> {
    let most = u64::from(MAX_OWNER);
    Ok(Owner { uid: cursor.uvarint(most)? as u32, gid: cursor.uvarint(most)? as u32 })
}

fn entry<'a>(cursor: &mut Cursor<'a>, root: bool) -> Result<Entry<'a>> {
    let flags = cursor.u8()?;
    if !(1..=4).contains(&(flags & 7)) {
        return Err(cursor.damaged("an entry of an unknown type"));
    }
    if flags & 0xc0 != 0 {
        return Err(cursor.damaged("a reserved bit is set"));
    }
    let name = if root { cursor.block(0, 0)? } else { cursor.block(1, MAX_NAME)? };
    if !usable(name) {
        return Err(cursor.damaged("a name that no file can have"));
    }
    let mode = cursor.uvarint(u64::from(MAX_MODE))? as u32;
    let mtime = time(cursor)?;
    let owner = if flags & 0x20 != 0 { Some(owner(cursor)?) } else { None };
    let attrs = if flags & 0x08 != 0 { Some(cursor.array()?) } else { None };
    let link = if flags & 0x10 != 0 { Some(cursor.array()?) } else { None };
    let body = match flags & 7 {
        1 => {
            let size = cursor.uvarint(MAX_SIZE)?;
            let form = if size == 0 { 0 } else { cursor.u8()? };
            let content = match form {
                0 if size == 0 => Content::Empty,
                1 if size < SMALL_FILE => Content::Blob(cursor.array()?),
                2 => Content::Paged(cursor.array()?),
                _ => return Err(cursor.damaged("content of an unknown form")),
            };
            Body::File { size, content }
        }
        2 => {
            let tree = cursor.array()?;
            if link.is_some() {
                return Err(cursor.damaged("a linked directory"));
            }
            Body::Directory { tree }
        }
        3 => {
            let target = cursor.block(1, MAX_TARGET)?;
            if target.contains(&0) || mode != SYMLINK_MODE {
                return Err(cursor.damaged("a target or mode that no symlink can have"));
            }
            Body::Symlink { target }
        }
        _ => Body::Fifo,
    };
    if attrs.is_some() && matches!(body, Body::Symlink { .. } | Body::Fifo) {
        return Err(cursor.damaged("attributes of neither file nor directory"));
    }
    if root && !matches!(body, Body::Directory { .. }) {
        return Err(cursor.damaged("a root that is no directory"));
    }
    Ok(Entry { name, mode, mtime, owner, attrs, link, body })
}

fn level(cursor: &mut Cursor<'_>) -> Result<u8> {
    match cursor.u8()? {
        level if level <= MAX_LEVEL => Ok(level),
        _ => Err(cursor.damaged("a level above 12")),
    }
}

/// Read items to the end of a page: at least `least`, at most 256.
fn items<'a, T>(
    cursor: &mut Cursor<'a>,
    least: usize,
    mut item: impl FnMut(&mut Cursor<'a>, Option<&T>) -> Result<T>,
) -> Result<Vec<T>> {
    let mut items = Vec::new();
    while !cursor.is_empty() {
        if items.len() == MAX_ENTRIES {
            return Err(cursor.damaged("more than 256 entries in one page"));
        }
        let next = item(cursor, items.last())?;
        items.push(next);
    }
    if items.len() < least {
        return Err(cursor.damaged("no entries in one page"));
    }
    Ok(items)
}

pub fn decode_tree(canonical: &[u8]) -> Result<Tree<'_>> {
    let mut cursor = open(Kind::Tree, canonical, "directory")?;
    let level = level(&mut cursor)?;
    if level == 0 {
        let entries = items(&mut cursor, 0, |cursor, last: Option<&Entry<'_>>| {
            let entry = entry(cursor, false)?;
            if last.is_some_and(|last| last.name >= entry.name) {
                return Err(cursor.damaged("names out of order"));
            }
            Ok(entry)
        })?;
        return Ok(Tree::Entries(entries));
    }
    let children = items(&mut cursor, 1, |cursor, before: Option<&TreeChild<'_>>| {
        let weight = cursor.uvarint(MAX_SIZE)?;
        let last = cursor.block(1, MAX_NAME)?;
        if weight == 0 || !usable(last) {
            return Err(cursor.damaged("an empty part, or a name that no file can have"));
        }
        if before.is_some_and(|before| before.last >= last) {
            return Err(cursor.damaged("names out of order"));
        }
        Ok(TreeChild { weight, last, id: cursor.array()? })
    })?;
    Ok(Tree::Children(level, children))
}

pub fn decode_page(canonical: &[u8]) -> Result<Page> {
    let mut cursor = open(Kind::Page, canonical, "list of chunks")?;
    let level = level(&mut cursor)?;
    if level == 0 {
        let extents = items(&mut cursor, 1, |cursor, last: Option<&Extent>| {
            let number = cursor.uvarint(u64::MAX)?;
            let (length, hole) = (number >> 1, number & 1 == 1);
            if length == 0 || (!hole && length > MAX_CHUNK) {
                return Err(cursor.damaged("a chunk of a wrong length"));
            }
            if hole && last.is_some_and(|last| last.id.is_none()) {
                return Err(cursor.damaged("two holes in a row"));
            }
            Ok(Extent { length, id: if hole { None } else { Some(cursor.array()?) } })
        })?;
        return Ok(Page::Extents(extents));
    }
    let children = items(&mut cursor, 1, |cursor, _| {
        let weight = cursor.uvarint(MAX_SIZE)?;
        if weight == 0 {
            return Err(cursor.damaged("an empty part"));
        }
        Ok(PageChild { weight, id: cursor.array()? })
    })?;
    Ok(Page::Children(level, children))
}

/// Extended attributes, sorted by name.
pub fn decode_attrs(canonical: &[u8]) -> Result<Vec<(&[u8], &[u8])>> {
    let mut cursor = open(Kind::Attrs, canonical, "set of attributes")?;
    let mut attributes: Vec<(&[u8], &[u8])> = Vec::new();
    while !cursor.is_empty() {
        let name = cursor.block(b"user.x".len(), MAX_NAME)?;
        let unsorted = attributes.last().is_some_and(|(last, _)| *last >= name);
        if !name.starts_with(b"user.") || name.contains(&0) || unsorted {
            return Err(cursor.damaged("a name that is not allowed there"));
        }
        attributes.push((name, cursor.block(0, MAX_VALUE)?));
    }
    if attributes.is_empty() {
        return Err(cursor.damaged("it is empty"));
    }
    Ok(attributes)
}

/// One entry of a tree of level 0 by itself.
pub fn decode_entry(bytes: &[u8]) -> Result<Entry<'_>> {
    let mut cursor = Cursor::new(bytes, "entry");
    let entry = entry(&mut cursor, false)?;
    cursor.finish()?;
    Ok(entry)
}

/// The root of a state by itself: an entry as a commit holds it.
pub fn decode_root(bytes: &[u8]) -> Result<Entry<'_>> {
    let mut cursor = Cursor::new(bytes, "root");
    let root = entry(&mut cursor, true)?;
    cursor.finish()?;
    Ok(root)
}

pub fn decode_commit(canonical: &[u8]) -> Result<Commit<'_>> {
    let mut cursor = open(Kind::Commit, canonical, "commit")?;
    if cursor.u8()? != 1 {
        return Err(cursor.damaged("an unknown version"));
    }
    let root = entry(&mut cursor, true)?;
    let count = usize::from(cursor.u8()?);
    if count > MAX_PARENTS {
        return Err(cursor.damaged("too many parents"));
    }
    let mut parents: Vec<Id> = Vec::with_capacity(count);
    for _ in 0..count {
        let parent = cursor.array()?;
        if parents.contains(&parent) {
            return Err(cursor.damaged("a parent twice"));
        }
        parents.push(parent);
    }
    let base = match cursor.u8()? {
        0 => None,
        1 => Some(cursor.array()?),
        _ => return Err(cursor.damaged("an unknown mark")),
    };
    let time = time(&mut cursor)?;
    let text = |bytes| std::str::from_utf8(bytes);
    let (author, message) = (cursor.block(0, MAX_AUTHOR)?, cursor.block(0, MAX_MESSAGE)?);
    let (Ok(author), Ok(message)) = (text(author), text(message)) else {
        return Err(cursor.damaged("text that is not UTF-8"));
    };
    cursor.finish()?;
    Ok(Commit { root, parents, base, time, author, message })
}
