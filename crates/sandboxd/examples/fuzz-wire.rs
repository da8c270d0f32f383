//! Feed the daemon's side of the wire with what no honest client sends, and check what must always hold.
//!
//! ```text
//! cargo run --example fuzz-wire -- --seconds 30 --seed 1
//! ```
//!
//! Each round makes a stream of bytes from the golden vectors and from frames that are nearly right, mutates it, and
//! gives it to three machines: in one piece, byte by byte, and in pieces of random sizes. All three must report the same
//! events, in the same order, and answer with the same bytes. Between the pieces the round also does what a daemon does
//! (sends, grants credit, ends and resets streams), at the same places for all three. No machine may panic, hold
//! more than its windows, or say anything after its last word. The same seed gives the same rounds.

#![allow(dead_code)]

#[path = "../src/pack.rs"]
mod pack;
#[path = "../src/wire.rs"]
mod wire;

use pack::{Map, MapWriter};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use wire::{Connection, HEADER, Kind, MAX_PAYLOAD, header};

const KEY: [u8; 32] = [1; 32];
const NONCE: [u8; 32] = [3; 32];

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

/// Every string of hexadecimal digits in the vectors that is whole bytes, whatever it is called there.
fn vectors() -> Result<Vec<Vec<u8>>, String> {
    let mut all = Vec::new();
    for name in ["frames.json", "hello.json", "reject.json"] {
        let path = format!("{}/../../spec/vectors/wire/{name}", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        let json: serde_json::Value =
            serde_json::from_str(&text).map_err(|error| format!("{path}: {error}"))?;
        gather(&json, &mut all);
    }
    Ok(all)
}

fn gather(json: &serde_json::Value, all: &mut Vec<Vec<u8>>) {
    match json {
        serde_json::Value::String(text) if text.len() > 2 && text.len() % 2 == 0 => {
            let bytes =
                (0..text.len()).step_by(2).map(|at| u8::from_str_radix(text.get(at..at + 2)?, 16).ok());
            all.extend(bytes.collect::<Option<Vec<u8>>>());
        }
        serde_json::Value::Array(list) => list.iter().for_each(|item| gather(item, all)),
        serde_json::Value::Object(map) => map.values().for_each(|item| gather(item, all)),
        _ => {}
    }
}

fn frame(kind: Kind, stream: u32, payload: &[u8]) -> Vec<u8> {
    [&header(kind, stream, payload.len())[..], payload].concat()
}

/// What an honest client says first.
fn hello(random: &mut Random) -> Vec<u8> {
    let hello = MapWriter::new(2).uint("generation", 1).bin("nonce", &[2; 32]).done();
    let mut bytes = frame(Kind::Hello, 0, &hello);
    let proof = MapWriter::new(1).bin("proof", &proof()).done();
    bytes.extend(frame(Kind::Hello, 0, &proof));
    if random.one_in(20) {
        mutate(random, &mut bytes);
    }
    bytes
}

fn proof() -> [u8; 32] {
    use hmac::Mac;
    let mut mac = hmac::Hmac::<sha2::Sha256>::new_from_slice(&KEY).expect("any key will do");
    mac.update(b"client");
    mac.update(&1u32.to_be_bytes());
    mac.update(&[2; 32]);
    mac.update(&NONCE);
    mac.finalize().into_bytes().into()
}

fn mutate(random: &mut Random, bytes: &mut Vec<u8>) {
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        match random.below(6) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            1 if !bytes.is_empty() => bytes[at] = random.next() as u8,
            2 => bytes.truncate(at),
            3 => {
                let more = random.bytes(12);
                bytes.splice(at..at, more);
            }
            4 if bytes.len() > at + 8 => drop(bytes.drain(at..at + random.below(8))),
            _ => {
                let again = bytes[at..].to_vec();
                bytes.extend(again.into_iter().take(200));
            }
        }
    }
}

/// Frames of a client that is nearly right: only now and then is one of them not allowed.
fn client(random: &mut Random, next: &mut u32) -> Vec<u8> {
    let known = 1 + 2 * random.below((*next as usize / 2).max(1)) as u32;
    let stream = if random.one_in(150) { random.next() as u32 } else { known };
    match if *next == 1 { 0 } else { random.below(24) } {
        0..5 => {
            let id = *next;
            *next += 2;
            let args = MapWriter::new(1).bin("x", &random.bytes(40)).done();
            let map = MapWriter::new(2).str("op", "exec.start");
            if !random.one_in(4) {
                return frame(Kind::Open, id, &map.raw("args", &args).done());
            }
            let open = frame(Kind::Open, id, &map.uint("args_len", args.len() as u64).done());
            let (one, other) = args.split_at(random.below(args.len()));
            let data = |part: &[u8]| match part {
                [] => Vec::new(),
                part => frame(Kind::Data, id, &[&[3][..], part].concat()),
            };
            [open, data(one), data(other)].concat()
        }
        5..14 => {
            let channel = if random.one_in(60) { random.below(6) as u8 } else { 0 };
            let most = if random.one_in(10) { MAX_PAYLOAD - 2 } else { 200 };
            let body: Vec<u8> = random.bytes(most);
            frame(Kind::Data, stream, &[&[channel, 7][..], &body].concat())
        }
        14 => frame(Kind::Eof, stream, &[if random.one_in(20) { random.below(5) as u8 } else { 0 }]),
        15..18 => frame(
            Kind::Credit,
            stream,
            &(1 + (random.next() >> (40 + random.below(20))) as u32).to_be_bytes(),
        ),
        18 => frame(Kind::Reset, stream, &MapWriter::new(1).str("reason", "r").done()),
        19..23 => frame(Kind::Ping, 0, &random.next().to_be_bytes()),
        _ if random.one_in(8) => {
            let length = random.below(30);
            let mut bytes = frame(Kind::Ping, stream, &random.bytes(length));
            bytes[4] = random.below(14) as u8;
            bytes
        }
        _ => Vec::new(),
    }
}

/// What the daemon does by itself, after so many events.
#[derive(Clone, Copy, Debug)]
enum Deed {
    Data(u32, u8, usize),
    Eof(u32),
    Taken(u32, u32),
    End(u32),
    Reset(u32),
    Goaway,
}

fn deed(random: &mut Random, next: u32) -> Deed {
    let stream = 1 + 2 * random.below((next as usize / 2).max(1)) as u32;
    match random.below(40) {
        0..15 => Deed::Data(stream, 1 + random.below(2) as u8, 1 + random.below(5_000)),
        15..18 => Deed::Eof(stream),
        18..34 => Deed::Taken(stream, random.below(140_000) as u32),
        34..37 => Deed::End(stream),
        37..39 => Deed::Reset(stream),
        _ if random.one_in(10) => Deed::Goaway,
        _ => Deed::Eof(stream),
    }
}

struct Machine {
    core: Connection,
    said: Vec<u8>,
    events: Vec<String>,
    deeds: usize,
    dead: bool,
    /// What arrived on each stream and was not reported as taken.
    waiting: std::collections::HashMap<u32, u64>,
}

impl Machine {
    fn new() -> Machine {
        Machine {
            core: Connection::daemon(KEY, NONCE),
            said: Vec::new(),
            events: Vec::new(),
            deeds: 0,
            dead: false,
            waiting: std::collections::HashMap::new(),
        }
    }

    fn feed(&mut self, mut bytes: &[u8], deeds: &[Deed]) {
        while !bytes.is_empty() && !self.dead {
            let space = self.core.space();
            assert!(!space.is_empty(), "a machine without room");
            let count = bytes.len().min(space.len());
            space[..count].copy_from_slice(&bytes[..count]);
            self.core.filled(count);
            bytes = &bytes[count..];
            while self.step(deeds) {}
        }
    }

    /// Take one event and answer with the next deed. `false` when there is none, or none any more.
    fn step(&mut self, deeds: &[Deed]) -> bool {
        let event = match self.core.next() {
            Ok(None) => return false,
            Ok(Some(event)) => {
                if let wire::Event::Data { stream, bytes, .. } = &event {
                    let waiting = self.waiting.entry(*stream).or_default();
                    *waiting += bytes.len() as u64 + 1;
                    assert!(*waiting <= 262_144, "{waiting} bytes beyond the window of stream {stream}");
                }
                let ends = matches!(event, wire::Event::Goaway { .. });
                let text = format!("{event:?}");
                self.dead |= ends;
                text
            }
            Err(error) => {
                self.dead = true;
                format!("{error:?}")
            }
        };
        self.events.push(event);
        if !self.dead {
            if let Some(deed) = deeds.get(self.deeds) {
                self.do_it(*deed);
            }
            self.deeds += 1;
        }
        self.said.append(self.core.output());
        !self.dead
    }

    fn do_it(&mut self, deed: Deed) {
        match deed {
            Deed::Data(stream, channel, size) if self.core.credit(stream) > size => {
                self.core.data(stream, channel, &vec![b'o'; size]);
            }
            Deed::Data(..) => {}
            Deed::Eof(stream) => self.core.eof(stream, 1),
            Deed::Taken(stream, most) => {
                let waiting = self.waiting.entry(stream).or_default();
                let taken = u64::from(most).min(*waiting);
                *waiting -= taken;
                self.core.consumed(stream, taken as u32);
            }
            Deed::End(stream) => self.core.end_stream(stream, &MapWriter::new(0).done()),
            // As the driver does: only what is open.
            Deed::Reset(stream) if self.core.credit(stream) > 0 => self.core.reset(stream, "fuzz"),
            Deed::Reset(_) => {}
            Deed::Goaway => {
                self.core.goaway("shutdown", "fuzz");
                self.dead = true;
            }
        }
    }
}

/// What was said must be whole frames, with nothing behind a last word.
fn check_said(said: &[u8]) {
    let mut at = 0;
    let mut over = false;
    while at < said.len() {
        assert!(!over, "something after GOAWAY");
        let length = u32::from_be_bytes(said[at..at + 4].try_into().expect("four bytes")) as usize;
        assert!(length <= MAX_PAYLOAD, "a frame above the cap");
        let payload = &said[at + HEADER..at + HEADER + length];
        over = said[at + 4] == Kind::Goaway as u8;
        if !matches!(said[at + 4], 3..=5 | 8 | 9) {
            assert!(Map::parse(payload).is_ok(), "a control frame that is no map");
        }
        at += HEADER + length;
    }
}

fn round(random: &mut Random, vectors: &[Vec<u8>]) -> usize {
    let mut next = 1;
    let mut bytes = if random.one_in(10) { Vec::new() } else { hello(random) };
    for _ in 0..random.below(60) {
        let mut part =
            if random.one_in(60) { random.pick(vectors).clone() } else { client(random, &mut next) };
        if random.one_in(40) && !part.is_empty() {
            mutate(random, &mut part);
        }
        bytes.extend(part);
    }
    let deeds: Vec<Deed> = (0..80).map(|_| deed(random, next)).collect();
    let (mut whole, mut single, mut pieces) = (Machine::new(), Machine::new(), Machine::new());
    whole.feed(&bytes, &deeds);
    for byte in bytes.chunks(1) {
        single.feed(byte, &deeds);
    }
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        let (now, later) = rest.split_at(1 + random.below(rest.len().min(3_000)));
        pieces.feed(now, &deeds);
        rest = later;
    }
    assert_eq!(whole.events, single.events, "byte by byte");
    assert_eq!(whole.events, pieces.events, "in pieces");
    assert!(whole.said == single.said && whole.said == pieces.said, "the answers differ");
    check_said(&whole.said);
    // The map reader by itself, on what is nearly a map.
    let mut map = random.pick(vectors).clone();
    mutate(random, &mut map);
    if let Ok(map) = Map::parse(&map) {
        let _ = (map.get("args"), map.uint("generation"), map.str("op"), map.bin("nonce"));
    }
    whole.events.len()
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0)
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
                eprintln!("usage: fuzz-wire [--seconds N] [--seed S]");
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
    let end = Instant::now() + Duration::from_secs(seconds);
    let (mut rounds, mut events) = (0u64, 0u64);
    let mut early = 0;
    while Instant::now() < end {
        // A round depends on the seed and its number alone, so a failure names all that repeats it.
        let mut random = Random((seed ^ rounds.wrapping_mul(0x9e37_79b9_7f4a_7c15)) | 1);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| round(&mut random, &vectors)));
        let Ok(count) = outcome else {
            eprintln!("round {rounds} of seed {seed} failed");
            return ExitCode::FAILURE;
        };
        events += count as u64;
        rounds += 1;
        if rounds == 200 {
            early = resident_kib();
        }
    }
    let grown = resident_kib().saturating_sub(early);
    println!("{rounds} rounds, {events} events, memory grew by {grown} KiB since the 200th round");
    if rounds > 200 && grown > 16 << 10 {
        eprintln!("memory grows");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
