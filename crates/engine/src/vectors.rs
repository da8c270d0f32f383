//! The golden vectors of the stored format (`spec/vectors/store`): what they say is written, read and refused.

use crate::error::{Error, Result};
use crate::format::{
    Body, Commit, Content, Cursor, Entry, Extent, Id, Kind, Owner, Page, PageChild, Time, Tree, TreeChild,
    decode_attrs, decode_commit, decode_page, decode_tree, encode_attrs, encode_commit, encode_page,
    encode_tree, identity, link_id,
};
use crate::format::{put_svarint, put_uvarint};
use crate::record::{Decoder, Header, MAX_HEADER, PACK_MAGIC};
use serde_json::Value;

/// What a file of vectors holds.
pub fn load(name: &str) -> Value {
    let path = format!("{}/../../spec/vectors/store/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap()
}

/// Bytes from hex in which `(61*4095)` is the byte 61, 4,095 times.
pub fn unhex(text: &str) -> Vec<u8> {
    let byte = |digits: &str| u8::from_str_radix(digits, 16).unwrap();
    let mut bytes = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        if let Some(run) = rest.strip_prefix('(') {
            let (run, behind) = run.split_once(')').unwrap();
            let (digits, count) = run.split_once('*').unwrap();
            bytes.extend(std::iter::repeat_n(byte(digits), count.parse().unwrap()));
            rest = behind;
        } else {
            bytes.push(byte(&rest[..2]));
            rest = &rest[2..];
        }
    }
    bytes
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn bytes(value: &Value) -> Vec<u8> {
    unhex(value.as_str().unwrap())
}

fn id<const N: usize>(value: &Value) -> [u8; N] {
    bytes(value).try_into().unwrap()
}

fn optional<const N: usize>(value: &Value) -> Option<[u8; N]> {
    (!value.is_null()).then(|| id(value))
}

fn time(value: &Value) -> Time {
    let nanoseconds = value["nanoseconds"].as_u64().unwrap() as u32;
    Time { seconds: value["seconds"].as_i64().unwrap(), nanoseconds }
}

fn kind(value: &Value) -> Kind {
    let name = value.as_str().unwrap();
    Kind::ALL.into_iter().find(|kind| format!("{kind:?}").to_lowercase() == name).unwrap()
}

fn is_damaged<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::Damaged(_)))
}

/// Call with the entry that a vector describes.
fn entry(value: &Value) -> Entry<'static> {
    let leak = |value: &Value| -> &'static [u8] { bytes(value).leak() };
    let body = match value["type"].as_str().unwrap() {
        "file" => {
            let content = match (optional(&value["content"]), value["paged"].as_bool().unwrap()) {
                (None, _) => Content::Empty,
                (Some(id), false) => Content::Blob(id),
                (Some(id), true) => Content::Paged(id),
            };
            Body::File { size: value["size"].as_u64().unwrap(), content }
        }
        "directory" => Body::Directory { tree: id(&value["content"]) },
        "symlink" => Body::Symlink { target: leak(&value["target"]) },
        _ => Body::Fifo,
    };
    let number = |value: &Value| value.as_u64().unwrap() as u32;
    let owner =
        value["owner"].as_array().map(|owner| Owner { uid: number(&owner[0]), gid: number(&owner[1]) });
    let (attrs, link) = (optional(&value["attrs"]), optional(&value["link"]));
    Entry {
        name: leak(&value["name"]),
        mode: number(&value["mode"]),
        mtime: time(value),
        owner,
        attrs,
        link,
        body,
    }
}

fn page(value: &Value) -> Page {
    let level = value["level"].as_u64().unwrap() as u8;
    let length = |item: &Value| item[0].as_u64().unwrap();
    if level == 0 {
        let extent = |item| Extent { length: length(item), id: optional(&item[1]) };
        return Page::Extents(list(&value["extents"]).iter().map(extent).collect());
    }
    let child = |item| PageChild { weight: length(item), id: id(&item[1]) };
    Page::Children(level, list(&value["children"]).iter().map(child).collect())
}

fn tree(value: &Value) -> Tree<'static> {
    let level = value["level"].as_u64().unwrap() as u8;
    if level == 0 {
        return Tree::Entries(list(&value["entries"]).iter().map(entry).collect());
    }
    let child = |item: &Value| TreeChild {
        weight: item[0].as_u64().unwrap(),
        last: bytes(&item[1]).leak(),
        id: id(&item[2]),
    };
    Tree::Children(level, list(&value["children"]).iter().map(child).collect())
}

#[test]
fn numbers() {
    let all = load("numbers");
    for vector in list(&all["uvarint"]) {
        let (value, expected) = (vector["value"].as_u64().unwrap(), bytes(&vector["hex"]));
        let mut out = Vec::new();
        put_uvarint(&mut out, value);
        assert_eq!(out, expected);
        let mut cursor = Cursor::new(&expected, "number");
        assert_eq!((cursor.uvarint(u64::MAX).unwrap(), cursor.is_empty()), (value, true));
    }
    for vector in list(&all["svarint"]) {
        let (value, expected) = (vector["value"].as_i64().unwrap(), bytes(&vector["hex"]));
        let mut out = Vec::new();
        put_svarint(&mut out, value);
        assert_eq!(out, expected);
        let mut cursor = Cursor::new(&expected, "number");
        assert_eq!((cursor.svarint().unwrap(), cursor.is_empty()), (value, true));
    }
    for vector in list(&all["refused"]) {
        let bad = bytes(&vector["hex"]);
        assert!(is_damaged(Cursor::new(&bad, "number").uvarint(u64::MAX)), "{vector}");
        assert!(is_damaged(Cursor::new(&bad, "number").svarint()), "{vector}");
    }
}

#[test]
fn objects() {
    let all = load("objects");
    assert!(list(&all["objects"]).len() > 30);
    for vector in list(&all["objects"]) {
        let (kind, canonical, value) = (kind(&vector["kind"]), bytes(&vector["hex"]), &vector["value"]);
        let name = &vector["name"];
        assert_eq!(identity(kind, &canonical), id::<32>(&vector["id"]), "{name}");
        assert!(canonical.len() <= kind.max_canonical());
        match kind {
            Kind::Blob => {}
            Kind::Page => {
                assert_eq!(decode_page(&canonical).unwrap(), page(value), "{name}");
                assert_eq!(encode_page(&page(value)), canonical, "{name}");
            }
            Kind::Tree => {
                assert_eq!(decode_tree(&canonical).unwrap(), tree(value), "{name}");
                assert_eq!(encode_tree(&tree(value)), canonical, "{name}");
            }
            Kind::Attrs => {
                let pairs: Vec<_> = list(&value["attributes"])
                    .iter()
                    .map(|pair| (bytes(&pair[0]), bytes(&pair[1])))
                    .collect();
                let borrowed: Vec<_> = pairs.iter().map(|(name, value)| (&name[..], &value[..])).collect();
                assert_eq!(decode_attrs(&canonical).unwrap(), borrowed, "{name}");
                assert_eq!(encode_attrs(&pairs), canonical, "{name}");
            }
            Kind::Commit => {
                let text = |value: &Value| String::from_utf8(bytes(value)).unwrap();
                let (author, message) = (text(&value["author"]), text(&value["message"]));
                let commit = Commit {
                    root: entry(&value["root"]),
                    parents: list(&value["parents"]).iter().map(id).collect::<Vec<Id>>(),
                    base: optional(&value["base"]),
                    time: time(value),
                    author: &author,
                    message: &message,
                };
                assert_eq!(decode_commit(&canonical).unwrap(), commit, "{name}");
                assert_eq!(encode_commit(&commit), canonical, "{name}");
            }
        }
    }
    for vector in list(&all["links"]) {
        assert_eq!(link_id(&bytes(&vector["path"])), id::<16>(&vector["id"]));
    }
}

#[test]
fn objects_that_are_refused() {
    let all = load("reject");
    assert!(list(&all["reject"]).len() > 90);
    for vector in list(&all["reject"]) {
        let canonical = bytes(&vector["hex"]);
        let refused = match kind(&vector["kind"]) {
            Kind::Page => is_damaged(decode_page(&canonical)),
            Kind::Tree => is_damaged(decode_tree(&canonical)),
            Kind::Attrs => is_damaged(decode_attrs(&canonical)),
            Kind::Commit => is_damaged(decode_commit(&canonical)),
            Kind::Blob => panic!("a blob is not decoded"),
        };
        assert!(refused, "{}", vector["name"]);
    }
}

fn read(record: &[u8], base: Option<&[u8]>) -> Result<(Header, Vec<u8>)> {
    let header = Header::parse(&record[..record.len().min(MAX_HEADER)])?;
    let canonical = Decoder::new().decode(&header, &record[header.size()..], base)?.to_vec();
    Ok((header, canonical))
}

#[test]
fn records() {
    let all = load("records");
    assert!(bytes(&all["pack_header"]["hex"]).starts_with(PACK_MAGIC));
    assert!(list(&all["records"]).len() >= 10);
    for vector in list(&all["records"]) {
        let (record, canonical) = (bytes(&vector["record"]), bytes(&vector["canonical"]));
        let base = &vector["base"];
        let base_bytes = base["canonical"].as_str().map(unhex);
        let (header, found) = read(&record, base_bytes.as_deref()).unwrap();
        assert_eq!(found, canonical, "{}", vector["name"]);
        assert_eq!((header.kind, header.id), (kind(&vector["kind"]), id(&vector["id"])));
        assert_eq!(header.form as u64, vector["form"].as_u64().unwrap());
        assert_eq!(u64::from(header.depth), vector["depth"].as_u64().unwrap());
        assert_eq!(header.base, optional(&base["id"]));
        assert_eq!(header.size() + header.length, record.len());
    }
}

#[test]
fn records_that_are_refused() {
    let all = load("records");
    assert!(list(&all["refused"]).len() > 40);
    for vector in list(&all["refused"]) {
        let base = vector["base"].as_str().map(unhex);
        assert!(is_damaged(read(&bytes(&vector["record"]), base.as_deref())), "{}", vector["name"]);
    }
}
