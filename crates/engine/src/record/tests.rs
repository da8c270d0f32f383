//! Records: every form comes back, whatever is changed in one is refused, and nothing is trusted.

use super::*;
use crate::testing::noise;
use proptest::collection::vec;
use proptest::prelude::*;

fn record(kind: Kind, canonical: &[u8], base: Option<Base<'_>>) -> Vec<u8> {
    let mut out = b"before".to_vec();
    let depth = Encoder::new().encode(kind, &identity(kind, canonical), canonical, base, &mut out).unwrap();
    let record = out.split_off(6);
    assert_eq!(out, b"before");
    assert_eq!(Header::parse(&record).unwrap().depth, depth);
    record
}

fn read(record: &[u8], base: Option<&[u8]>) -> Result<Vec<u8>> {
    let header = Header::parse(&record[..record.len().min(MAX_HEADER)])?;
    let mut decoder = Decoder::new();
    let first = decoder.decode(&header, &record[header.size()..], base).map(<[u8]>::to_vec);
    // A decoder that failed is as good as a new one.
    let again = decoder.decode(&header, &record[header.size()..], base).map(<[u8]>::to_vec);
    assert_eq!(first.as_ref().ok(), again.as_ref().ok());
    first
}

fn is_damaged<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::Damaged(_)))
}

#[test]
fn the_smallest_form_is_taken() {
    let text = b"the same words over and over, ".repeat(100);
    let random = noise(1, 20_000);
    let mut edited = random.clone();
    edited[10_000] ^= 1;
    let base_id = identity(Kind::Blob, &random);
    let base = Base { id: &base_id, canonical: &random, depth: 3 };
    let form = |record: &[u8]| Header::parse(record).unwrap().form;
    let raw = record(Kind::Blob, &random, None);
    assert_eq!((form(&raw), raw.len()), (Form::Raw, MIN_HEADER + random.len()));
    assert_eq!(form(&record(Kind::Blob, &text, None)), Form::Zstd);
    let patch = record(Kind::Blob, &edited, Some(base));
    let header = Header::parse(&patch).unwrap();
    assert_eq!((header.form, header.depth, header.base), (Form::Patch, 4, Some(base_id)));
    assert!(patch.len() < 300, "{}", patch.len());
    assert_eq!(read(&patch, Some(&random)).unwrap(), edited);
    // A base that is deep enough, is the object itself, or is empty, is none.
    assert_eq!(form(&record(Kind::Blob, &edited, Some(Base { depth: 4, ..base }))), Form::Raw);
    assert_eq!(form(&record(Kind::Blob, &edited, Some(Base { canonical: b"", ..base }))), Form::Raw);
    assert_eq!(form(&record(Kind::Blob, &random, Some(base))), Form::Raw);
    // Nor one that does not help.
    let other = noise(2, 20_000);
    assert_eq!(form(&record(Kind::Blob, &edited, Some(Base { canonical: &other, ..base }))), Form::Raw);
}

#[test]
fn lengths_that_no_object_has_are_not_written() {
    for bytes in [Vec::new(), vec![0; 131_072]] {
        let id = identity(Kind::Blob, &bytes);
        let done = Encoder::new().encode(Kind::Blob, &id, &bytes, None, &mut Vec::new());
        assert!(matches!(done, Err(Error::Invalid(_))));
    }
}

#[test]
fn a_base_that_begins_like_a_dictionary_is_content() {
    // The magic number of a zstd dictionary, RFC 8878 section 5.
    let base = [&[0x37, 0xa4, 0x30, 0xec][..], &noise(3, 9_000)].concat();
    let mut edited = base.clone();
    edited.truncate(8_000);
    let id = identity(Kind::Blob, &base);
    let patch = record(Kind::Blob, &edited, Some(Base { id: &id, canonical: &base, depth: 0 }));
    assert!(patch.len() < 200);
    assert_eq!(read(&patch, Some(&base)).unwrap(), edited);
}

#[test]
fn every_changed_bit_is_found() {
    let text = b"some words ".repeat(9);
    let base = noise(4, 400);
    let id = identity(Kind::Tree, &base);
    let mut edited = base.clone();
    edited[7] ^= 1;
    for (record, base) in [
        (record(Kind::Attrs, &text, None), None),
        (record(Kind::Blob, &base, None), None),
        (record(Kind::Tree, &edited, Some(Base { id: &id, canonical: &base, depth: 0 })), Some(&base[..])),
    ] {
        let whole = read(&record, base).unwrap();
        for at in 0..record.len() {
            for bit in 0..8 {
                let mut bad = record.clone();
                bad[at] ^= 1 << bit;
                // A bit of the frame may be one that zstd does not use: then the bytes are the same.
                assert!(read(&bad, base).map_or_else(|_| true, |bytes| bytes == whole), "{at}:{bit}");
            }
            assert!(is_damaged(read(&record[..at], base)), "cut to {at}");
        }
        assert!(is_damaged(read(&[&record[..], &[0]].concat(), base)), "a byte more");
    }
}

/// A header with its right checksum, whatever it says.
fn forged(kind: u8, form: u8, depth: u8, canonical: u32, length: u32, id: Id, base: &[u8]) -> Vec<u8> {
    let mut out = vec![MARK, kind, form, depth];
    out.extend(canonical.to_le_bytes());
    out.extend(length.to_le_bytes());
    out.extend(id);
    out.extend(base);
    out.extend(crc32fast::hash(&out).to_le_bytes());
    out
}

#[test]
fn headers_that_no_writer_makes_are_refused() {
    let id = [5; 32];
    assert!(Header::parse(&forged(1, 1, 0, 131_071, 132_095, id, &[])).is_ok());
    assert!(Header::parse(&forged(1, 2, 4, 10, 10, id, &[6; 32])).is_ok());
    for bad in [
        forged(0, 0, 0, 1, 1, id, &[]),
        forged(6, 0, 0, 1, 1, id, &[]),
        forged(1, 3, 0, 1, 1, id, &[]),
        forged(1, 0, 0, 131_072, 1, id, &[]),
        forged(2, 0, 0, 65_537, 1, id, &[]),
        forged(3, 0, 0, 65_537, 1, id, &[]),
        forged(4, 0, 0, 1_048_577, 1, id, &[]),
        forged(5, 0, 0, 131_073, 1, id, &[]),
        forged(1, 0, 0, u32::MAX, u32::MAX, id, &[]),
        forged(1, 1, 0, 10, 1_035, id, &[]),
        forged(1, 0, 0, 10, 9, id, &[]),
        forged(1, 0, 0, 10, 11, id, &[]),
        forged(1, 0, 0, 0, 0, id, &[]),
        forged(1, 1, 0, 0, 9, id, &[]),
        forged(1, 0, 1, 10, 10, id, &[]),
        forged(1, 1, 1, 10, 10, id, &[]),
        forged(1, 2, 0, 10, 10, id, &[6; 32]),
        forged(1, 2, 5, 10, 10, id, &[6; 32]),
        forged(1, 2, 1, 10, 10, id, &[]),
    ] {
        assert!(is_damaged(Header::parse(&bad)), "{bad:x?}");
    }
    let mut crc = forged(1, 0, 0, 1, 1, id, &[]);
    crc[47] ^= 1;
    assert!(is_damaged(Header::parse(&crc)));
}

fn with_payload(kind: Kind, form: Form, canonical: &[u8], says: usize, payload: &[u8]) -> Vec<u8> {
    let id = identity(kind, canonical);
    [forged(kind as u8, form as u8, 0, says as u32, payload.len() as u32, id, &[]), payload.to_vec()].concat()
}

#[test]
fn payloads_that_no_writer_makes_are_refused() {
    let text = b"some words ".repeat(9);
    let mut frame = Vec::with_capacity(1_000);
    zstd_safe::compress(&mut frame, &text, 1).unwrap();
    let good = with_payload(Kind::Blob, Form::Zstd, &text, text.len(), &frame);
    assert_eq!(read(&good, None).unwrap(), text);
    // Two frames, one behind the other, whose bytes together would be right.
    let (left, right) = text.split_at(40);
    let mut two = Vec::new();
    for half in [left, right] {
        let mut frame = Vec::with_capacity(1_000);
        zstd_safe::compress(&mut frame, half, 1).unwrap();
        two.extend(frame);
    }
    assert!(is_damaged(read(&with_payload(Kind::Blob, Form::Zstd, &text, text.len(), &two), None)));
    // A skippable frame before or after, or alone for nothing.
    let skip = [&0x184d_2a50u32.to_le_bytes()[..], &4u32.to_le_bytes(), b"skip"].concat();
    for payload in [[&skip[..], &frame].concat(), [&frame[..], &skip].concat()] {
        assert!(is_damaged(read(&with_payload(Kind::Blob, Form::Zstd, &text, text.len(), &payload), None)));
    }
    // Another length than the frame's, and a frame that does not say its size.
    assert!(is_damaged(read(&with_payload(Kind::Blob, Form::Zstd, &text, text.len() + 1, &frame), None)));
    let mut silent = Vec::with_capacity(1_000);
    let mut context = CCtx::create();
    context.set_parameter(CParameter::ContentSizeFlag(false)).unwrap();
    context.compress2(&mut silent, &text).unwrap();
    assert!(is_damaged(read(&with_payload(Kind::Blob, Form::Zstd, &text, text.len(), &silent), None)));
    // A frame that promises little and holds much: its blocks are never written past what it said.
    let mut bomb = Vec::with_capacity(1_000);
    zstd_safe::compress(&mut bomb, &vec![0; 100_000], 1).unwrap();
    assert_eq!(bomb[4] >> 6, 2, "a content size of four bytes follows");
    bomb[5..9].copy_from_slice(&64u32.to_le_bytes());
    assert!(is_damaged(read(&with_payload(Kind::Blob, Form::Zstd, &[0; 64], 64, &bomb), None)));
    // A patch without its base, or with another.
    let base = noise(5, 500);
    let id = identity(Kind::Blob, &base);
    // Apart in memory: zstd leaves out what overlaps.
    let edited = base[1..].to_vec();
    let patch = record(Kind::Blob, &edited, Some(Base { id: &id, canonical: &base, depth: 0 }));
    assert!(patch.len() < 200);
    assert!(is_damaged(read(&patch, None)));
    assert!(is_damaged(read(&patch, Some(b""))));
    assert!(is_damaged(read(&patch, Some(&noise(6, 500)))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn objects_come_back(
        kind in prop::sample::select(Kind::ALL.to_vec()),
        bytes in vec(prop_oneof![Just(b'x'), any::<u8>()], 1..5_000),
        base in prop::option::of(vec(any::<u8>(), 0..3_000)),
        depth in 0..=MAX_PATCH_DEPTH,
        shared in 0..4_000usize,
    ) {
        let base = base.map(|base| [&base[..], &bytes[..shared.min(bytes.len())]].concat());
        let id = identity(kind, base.as_deref().unwrap_or_default());
        let hint = base.as_deref().map(|canonical| Base { id: &id, canonical, depth });
        let record = record(kind, &bytes, hint);
        prop_assert!(record.len() <= MAX_HEADER + bytes.len());
        prop_assert_eq!(read(&record, base.as_deref()).unwrap(), bytes);
    }

    #[test]
    fn any_header_is_taken_or_refused(mut bytes in vec(any::<u8>(), 0..100), honest: bool) {
        if honest && bytes.len() >= MIN_HEADER {
            bytes[0] = MARK;
            bytes[2] %= 3;
            let end = if bytes[2] == 2 { MAX_HEADER } else { MIN_HEADER };
            if bytes.len() >= end {
                let crc = crc32fast::hash(&bytes[..end - 4]);
                bytes[end - 4..end].copy_from_slice(&crc.to_le_bytes());
            }
        }
        if let Ok(header) = Header::parse(&bytes) {
            let mut again = Vec::new();
            header.put(&mut again);
            prop_assert_eq!(&again[..], &bytes[..header.size()]);
        }
    }
}
