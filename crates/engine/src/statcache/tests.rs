use super::{Form, Record, StatCache, save};
use crate::format::Content;
use crate::scan::State;
use crate::testing::Scratch;
use proptest::prelude::*;

const DEVICE: u64 = 0x1234_5678_9abc;

fn record(inode: u64, form: Form, attrs: Option<[u8; 32]>) -> Record {
    let state = State { inode, size: inode + 7, mtime: (-5, 999_999_999), ctime: (inode as i64, 3) };
    Record { state, data: inode + 1, form, attrs }
}

fn records() -> Vec<Record> {
    let id = |byte| [byte; 32];
    vec![
        record(1, Form::File(Content::Empty), None),
        record(2, Form::File(Content::Blob(id(2))), Some(id(0xaa))),
        record(9, Form::File(Content::Paged(id(9))), None),
        record(10, Form::Directory(id(10)), Some(id(0xbb))),
        record(u64::MAX - 8, Form::File(Content::Blob(id(3))), Some(id(0xaa))),
    ]
}

fn write(path: &std::path::Path, records: &[Record]) {
    let attrs = [[0xaa; 32], [0xbb; 32]];
    save(path, (DEVICE, &[7; 32]), &attrs, records.len(), records.iter().copied()).unwrap();
}

#[test]
fn what_is_written_is_found() {
    let scratch = Scratch::new();
    let path = scratch.path().join("cache");
    write(&path, &records());
    let cache = StatCache::load(&path, DEVICE).unwrap();
    assert_eq!(cache.root, [7; 32]);
    for record in records() {
        assert_eq!(cache.find(record.state.inode), Some(record));
    }
    for inode in [0, 3, 8, 11, u64::MAX] {
        assert_eq!(cache.find(inode), None);
    }
    assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 1, "nothing is left beside it");
}

#[test]
fn the_bytes_are_those_of_the_reference() {
    // store/statcache.py: struct "<8sQ32sQII", then "<QQQqqIIB3xI32s" for each record.
    let scratch = Scratch::new();
    let path = scratch.path().join("cache");
    write(&path, &records()[1..2]);
    let bytes = std::fs::read(&path).unwrap();
    let mut want = b"ASBSTAT1".to_vec();
    want.extend(DEVICE.to_le_bytes());
    want.extend([7; 32]);
    want.extend([1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    want.extend([2, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
    want.extend((-5i64).to_le_bytes());
    want.extend(2i64.to_le_bytes());
    want.extend(999_999_999u32.to_le_bytes());
    want.extend([3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]);
    want.extend([2; 32]);
    want.extend([0xaa; 32]);
    want.extend([0xbb; 32]);
    assert_eq!(bytes[..bytes.len() - 32], want);
    assert_eq!(bytes[bytes.len() - 32..], *blake3::hash(&want).as_bytes());
}

#[test]
fn many_records_are_found() {
    let scratch = Scratch::new();
    let path = scratch.path().join("cache");
    let records: Vec<Record> =
        (0..5_000).map(|at| record(3 * at, Form::File(Content::Blob([at as u8; 32])), None)).collect();
    write(&path, &records);
    let cache = StatCache::load(&path, DEVICE).unwrap();
    for inode in 0..15_000 {
        let want = records.get(inode as usize / 3).filter(|_| inode % 3 == 0);
        assert_eq!(cache.find(inode).as_ref(), want);
    }
}

#[test]
fn of_another_device_it_is_none() {
    let scratch = Scratch::new();
    let path = scratch.path().join("cache");
    write(&path, &records());
    assert!(StatCache::load(&path, DEVICE + 1).is_none());
    assert!(StatCache::load(&scratch.path().join("absent"), DEVICE).is_none());
    assert!(StatCache::load(scratch.path(), DEVICE).is_none());
}

proptest! {
    #[test]
    fn what_is_damaged_is_none(at in 0usize..704, bit in 0u8..8, cut in 0usize..704) {
        let scratch = Scratch::new();
        let path = scratch.path().join("cache");
        write(&path, &records());
        let mut bytes = std::fs::read(&path).unwrap();
        let at = at % bytes.len();
        bytes[at] ^= 1 << bit;
        std::fs::write(&path, &bytes).unwrap();
        prop_assert!(StatCache::load(&path, DEVICE).is_none());
        bytes.truncate(cut.min(bytes.len() - 1));
        std::fs::write(&path, &bytes).unwrap();
        prop_assert!(StatCache::load(&path, DEVICE).is_none());
    }

    #[test]
    fn no_bytes_with_a_right_sum_are_read_beyond_their_end(
        count in any::<u64>(), attrs in any::<u32>(), rest in prop::collection::vec(any::<u8>(), 0..400)
    ) {
        let scratch = Scratch::new();
        let path = scratch.path().join("cache");
        let mut bytes = b"ASBSTAT1".to_vec();
        bytes.extend(DEVICE.to_le_bytes());
        bytes.extend([0; 32]);
        bytes.extend(count.to_le_bytes());
        bytes.extend(attrs.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(rest);
        bytes.extend(*blake3::hash(&bytes).as_bytes());
        std::fs::write(&path, &bytes).unwrap();
        if let Some(cache) = StatCache::load(&path, DEVICE) {
            let _ = cache.find(0);
        }
    }
}
