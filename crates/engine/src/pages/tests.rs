use super::{FilePages, Made, TreePages};
use crate::format::{Body, Content, Entry, Extent, Id, Time, hex, identity, put_entry};
use crate::vectors::load;
use serde_json::Value;

fn stream(seed: &str, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    blake3::Hasher::new().update(seed.as_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

/// The extents that a vector describes.
fn extents(made_by: &Value) -> Vec<Extent> {
    if let Some(runs) = made_by["runs"].as_array() {
        return runs
            .iter()
            .flat_map(|run| {
                let id = run[2].as_u64().map(|last| {
                    let mut id = [0x11; 32];
                    id[31] = last as u8;
                    id
                });
                std::iter::repeat_n(Extent { length: number(&run[1]), id }, number(&run[0]) as usize)
            })
            .collect();
    }
    let (count, every) = (number(&made_by["count"]), number(&made_by["hole_every"]));
    let data = stream(made_by["seed"].as_str().unwrap(), 36 * count as usize);
    (0..count)
        .zip(data.chunks_exact(36))
        .map(|(at, piece)| {
            let random = u64::from(u32::from_le_bytes(piece[..4].try_into().unwrap()));
            if every > 0 && at % every == every - 1 {
                Extent { length: 4_096 * (1 + random % 1_000), id: None }
            } else {
                Extent { length: 1 + random % 32_768, id: Some(piece[4..].try_into().unwrap()) }
            }
        })
        .collect()
}

fn put(made: Made<'_>) -> crate::error::Result<Id> {
    Ok(identity(made.kind, made.canonical))
}

#[test]
fn lists_of_chunks_have_the_pages_of_the_vectors() {
    for vector in load("pages")["files"].as_array().unwrap() {
        let mut pages = FilePages::default();
        let mut top = 0;
        let mut size = 0;
        let mut put = |made: Made<'_>| {
            top = top.max(made.level);
            size = made.start + made.weight;
            put(made)
        };
        for extent in extents(&vector["extents"]) {
            pages.add(&extent, &mut put).unwrap();
        }
        let root = pages.finish(&mut put).unwrap().unwrap();
        assert_eq!(hex(&root), vector["root"], "{}", vector["name"]);
        assert_eq!(usize::from(top) + 1, vector["pages"].as_array().unwrap().len(), "{}", vector["name"]);
        assert_eq!(size, number(&vector["size"]), "{}", vector["name"]);
    }
}

#[test]
fn a_list_without_entries_has_no_page() {
    assert_eq!(FilePages::default().finish(&mut put).unwrap(), None);
}

#[test]
fn directories_have_the_pages_of_the_vectors() {
    for vector in load("pages")["directories"].as_array().unwrap() {
        let made_by = &vector["entries"];
        let (prefix, count) = (made_by["prefix"].as_str().unwrap(), number(&made_by["count"]));
        let ids = stream(prefix, 32 * count as usize);
        let mut pages = TreePages::default();
        let mut firsts = Vec::new();
        let mut put = |made: Made<'_>| {
            firsts.push((made.level, made.first.to_vec()));
            put(made)
        };
        for (at, id) in (0..count).zip(ids.chunks_exact(32)) {
            let width = number(&made_by["length"]) as usize;
            let name = format!("{:x<width$}", format!("{prefix}{at:06}"));
            let target = vec![0x61 + (at % 26) as u8; number(&made_by["target"]) as usize];
            let (mode, seconds, nanoseconds, body) = if made_by["type"] == "file" {
                let content = Content::Blob(id.try_into().unwrap());
                (0o644, at, at, Body::File { size: 1 + at % 131_071, content })
            } else {
                (0o777, 0, 0, Body::Symlink { target: &target })
            };
            let mtime = Time { seconds: seconds as i64, nanoseconds: nanoseconds as u32 };
            let entry =
                Entry { name: name.as_bytes(), mode, mtime, owner: None, attrs: None, link: None, body };
            pages.add(entry.name, &mut |page| put_entry(page, &entry), &mut put).unwrap();
        }
        assert_eq!(hex(&pages.finish(&mut put).unwrap()), vector["root"], "{}", vector["name"]);
        // A page above begins with the first name of the first page below.
        assert!(
            firsts.iter().all(|(level, first)| *level == 0 || firsts.contains(&(level - 1, first.clone())))
        );
    }
}
