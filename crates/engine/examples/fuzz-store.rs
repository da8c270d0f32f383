//! Feed the decoders of the stored format with what no writer writes, and check what must always hold.
//!
//! ```text
//! cargo run --release --example fuzz-store -- --seconds 30 --seed 1
//! ```
//!
//! Each round takes objects or records of the golden vectors, changes them, and gives them to every decoder: trees,
//! pages, attributes, commits, roots, record headers with a checksum that is right, payloads with and without a base.
//! No decoder may panic, or hold more memory than an object can need. What one takes must be written again in the same
//! bytes, since a state has one form only; a record that is taken holds what its id says. The same seed gives the
//! same rounds.

use agent_sandbox_engine::error::Error;
use agent_sandbox_engine::format::{
    Kind, decode_attrs, decode_commit, decode_entry, decode_page, decode_root, decode_tree, encode_attrs,
    encode_commit, encode_page, encode_tree, identity, put_entry,
};
use agent_sandbox_engine::record::{Base, Decoder, Encoder, Form, Header, MAX_HEADER, MIN_HEADER};
use std::alloc::{GlobalAlloc, Layout, System};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// What the entries of a page, or the ids of a commit, can take.
const MOST_LIST: usize = 256 << 10;
/// A megabyte of attributes without values is 131,072 pairs of slices, in a list that grows by doubling.
const MOST_ATTRS: usize = 16 << 20;
/// The largest object, and the text of an error.
const MOST_RECORD: usize = (1 << 20) + (4 << 10);

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: everything is left to the system's allocator; only sizes are counted.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(held, Ordering::Relaxed);
        // SAFETY: as the caller says.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller says.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Xorshift, so that a seed is all that a round depends on.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn bytes(&mut self, most: usize) -> Vec<u8> {
        (0..self.below(most + 1)).map(|_| self.next() as u8).collect()
    }

    fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

/// Every string in the vectors that is bytes in hexadecimal, whatever it is called there; `(61*4095)` is a run.
fn vectors() -> Result<Vec<Vec<u8>>, String> {
    let mut all = Vec::new();
    for name in ["objects", "reject", "records"] {
        let path = format!("{}/../../spec/vectors/store/{name}.json", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        let json = serde_json::from_str(&text).map_err(|error| format!("{path}: {error}"))?;
        gather(&json, &mut all);
    }
    Ok(all)
}

fn gather(json: &serde_json::Value, all: &mut Vec<Vec<u8>>) {
    match json {
        serde_json::Value::String(text) => all.extend(unhex(text)),
        serde_json::Value::Array(list) => list.iter().for_each(|item| gather(item, all)),
        serde_json::Value::Object(map) => map.values().for_each(|item| gather(item, all)),
        _ => {}
    }
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (digits, count, behind) = match rest.strip_prefix('(') {
            Some(run) => {
                let (run, behind) = run.split_once(')')?;
                let (digits, count) = run.split_once('*')?;
                (digits, count.parse().ok()?, behind)
            }
            None => (rest.get(..2)?, 1, &rest[2..]),
        };
        bytes.extend(std::iter::repeat_n(u8::from_str_radix(digits, 16).ok()?, count));
        rest = behind;
    }
    Some(bytes)
}

fn mutate(random: &mut Random, bytes: &mut Vec<u8>, vectors: &[Vec<u8>]) {
    for _ in 0..=random.below(4) {
        // Most of what matters is in front.
        let most = if random.one_in(2) { bytes.len().min(64) } else { bytes.len() };
        let at = random.below(most);
        match random.below(9) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            1 if !bytes.is_empty() => bytes[at] = random.next() as u8,
            2 if !bytes.is_empty() => bytes[at] = *random.pick(&[0, 1, 0x7f, 0x80, 0xff, b'/', b'.']),
            3 => bytes.truncate(at),
            4 => {
                let more = random.bytes(12);
                bytes.splice(at..at, more);
            }
            5 => drop(bytes.splice(at..at, [0xff; 9].into_iter().chain([random.next() as u8 & 3]))),
            6 if bytes.len() > at + 8 => drop(bytes.drain(at..at + random.below(8))),
            7 => {
                let other = random.pick(vectors);
                let from = random.below(other.len());
                let part: Vec<u8> = other[from..].iter().copied().take(random.below(200)).collect();
                bytes.splice(at..at, part);
            }
            _ => {
                let again: Vec<u8> = bytes[at..].iter().copied().take(random.below(300)).collect();
                for _ in 0..random.below(300) {
                    if bytes.len() > 2 << 20 {
                        break;
                    }
                    bytes.extend_from_slice(&again);
                }
            }
        }
    }
}

/// A refusal must be one of damage, and nothing else.
fn refused<T>(error: Error) -> Option<T> {
    assert!(matches!(error, Error::Damaged(_)), "{error:?}");
    None
}

/// Decode, holding at most so much memory.
fn within<T>(most: usize, decode: impl FnOnce() -> T) -> T {
    let before = HELD.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let decoded = decode();
    let held = PEAK.load(Ordering::Relaxed) - before;
    assert!(held <= most, "{held} bytes held for one object");
    decoded
}

/// Give bytes to every decoder of objects; how many took them.
fn decode(bytes: &[u8]) -> usize {
    let mut taken = 0;
    let mut same = |again: Option<Vec<u8>>| {
        if let Some(again) = again {
            assert!(again == bytes, "taken, but written otherwise");
            taken += 1;
        }
    };
    same(within(MOST_LIST, || decode_tree(bytes)).map_or_else(refused, |tree| Some(encode_tree(&tree))));
    same(within(MOST_LIST, || decode_page(bytes)).map_or_else(refused, |page| Some(encode_page(&page))));
    same(within(MOST_ATTRS, || decode_attrs(bytes)).map_or_else(refused, |attrs| Some(encode_attrs(&attrs))));
    same(
        within(MOST_LIST, || decode_commit(bytes))
            .map_or_else(refused, |commit| Some(encode_commit(&commit))),
    );
    for entry in [decode_root(bytes), decode_entry(bytes)] {
        same(entry.map_or_else(refused, |entry| {
            let mut out = Vec::new();
            put_entry(&mut out, &entry);
            Some(out)
        }));
    }
    taken
}

/// Give a record to its decoder; whether it was taken.
fn decode_record(decoder: &mut Decoder, record: &[u8], base: Option<&[u8]>) -> bool {
    let header = match Header::parse(&record[..record.len().min(MAX_HEADER)]) {
        Ok(header) => header,
        Err(error) => return refused::<()>(error).is_some(),
    };
    assert!((1..=header.kind.max_canonical()).contains(&header.canonical));
    let payload = record.get(header.size()..).unwrap_or_default();
    match within(MOST_RECORD, || decoder.decode(&header, payload, base)) {
        Ok(canonical) => {
            assert_eq!((canonical.len(), identity(header.kind, canonical)), (header.canonical, header.id));
            true
        }
        Err(error) => refused::<()>(error).is_some(),
    }
}

/// Make the checksum of a header right, so that what it says is looked at.
fn seal(record: &mut [u8]) {
    let size = if record.get(2) == Some(&(Form::Patch as u8)) { MAX_HEADER } else { MIN_HEADER };
    if record.len() >= size {
        let sum = crc32fast::hash(&record[..size - 4]);
        record[size - 4..size].copy_from_slice(&sum.to_le_bytes());
    }
}

struct Tools {
    encoder: Encoder,
    decoder: Decoder,
}

fn round(random: &mut Random, vectors: &[Vec<u8>], tools: &mut Tools) -> usize {
    let mut bytes = random.pick(vectors).clone();
    if !random.one_in(20) {
        mutate(random, &mut bytes, vectors);
    }
    let mut taken = decode(&bytes);
    // A record from the vectors, changed, with a checksum that is right.
    let base = random.pick(vectors);
    let base = Some(&base[..]).filter(|_| random.one_in(2));
    seal(&mut bytes);
    taken += usize::from(decode_record(&mut tools.decoder, &bytes, base));
    // A record of our own: what it holds comes back, and changed it is refused or the same.
    let kind = *random.pick(&Kind::ALL);
    let canonical: Vec<u8> = random.pick(vectors).iter().copied().take(kind.max_canonical()).collect();
    if canonical.is_empty() {
        return taken;
    }
    let id = identity(kind, &canonical);
    let mut near = canonical.clone();
    mutate(random, &mut near, vectors);
    let base_id = identity(kind, &near);
    let hint = Base { id: &base_id, canonical: &near, depth: random.below(6) as u8 };
    let mut record = Vec::new();
    tools
        .encoder
        .encode(kind, &id, &canonical, Some(hint).filter(|_| random.one_in(2)), &mut record)
        .expect("it fits");
    assert!(decode_record(&mut tools.decoder, &record, Some(&near)), "what was written is read");
    mutate(random, &mut record, vectors);
    if random.one_in(2) {
        seal(&mut record);
    }
    taken + usize::from(decode_record(&mut tools.decoder, &record, Some(&near)))
}

fn main() -> ExitCode {
    let (mut seconds, mut seed) = (30, 1);
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let value = args.next().and_then(|value| value.parse().ok());
        match (name.as_str(), value) {
            ("--seconds", Some(value)) => seconds = value,
            ("--seed", Some(value)) => seed = value,
            _ => {
                eprintln!("usage: fuzz-store [--seconds N] [--seed S]");
                return ExitCode::from(2);
            }
        }
    }
    let vectors = match vectors() {
        Ok(vectors) if !vectors.is_empty() => vectors,
        Ok(_) => {
            eprintln!("no vectors");
            return ExitCode::FAILURE;
        }
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::FAILURE;
        }
    };
    let mut tools = Tools { encoder: Encoder::new(), decoder: Decoder::new() };
    let end = Instant::now() + Duration::from_secs(seconds);
    static ROUND: AtomicU64 = AtomicU64::new(0);
    std::panic::set_hook(Box::new(move |panic| {
        eprintln!("{panic}\nround {} of seed {seed} failed", ROUND.load(Ordering::Relaxed));
        std::process::exit(1);
    }));
    let mut taken = 0;
    while Instant::now() < end {
        // A round depends on the seed and its number alone, so a failure names all that repeats it.
        let number = ROUND.load(Ordering::Relaxed);
        let mut random = Random((seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15)) | 1);
        taken += round(&mut random, &vectors, &mut tools);
        ROUND.store(number + 1, Ordering::Relaxed);
    }
    println!("{} rounds, {taken} objects and records taken", ROUND.load(Ordering::Relaxed));
    ExitCode::SUCCESS
}
