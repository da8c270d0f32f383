//! Where a connection begins on a channel that outlives its clients, without I/O.
//!
//! A virtio-serial port is one stream of bytes for the whole life of a machine: what a client that went away had half
//! sent is followed by what the next one sends. So a client says [`MAGIC`] and a fresh nonce first, and is answered by
//! the same 32 bytes. The magic means this wherever it comes, in the middle of a frame too; therefore a client puts one
//! byte, not the magic's last, behind each of its later bytes that complete the first 15 of the magic, and that byte is
//! taken out here. No byte of the magic but its first is 0xF5, so the last 15 bytes alone decide.
//!
//! ```text
//! Between   bytes are discarded   ──MAGIC──► Nonce
//! Nonce     16 bytes              ──16th───► Open
//! Open      the connection's      ──close()► Between     any state ──MAGIC──► Nonce
//! ```

pub const MAGIC: [u8; 16] = *b"\xf5sandboxd-begin\n";
pub const NONCE: usize = 16;
const LAST: usize = MAGIC.len() - 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Between,
    Nonce([u8; NONCE], usize),
    Open,
}

pub struct Beginnings {
    phase: Phase,
    /// How many bytes of the magic the last ones are.
    matched: usize,
}

/// What became of some bytes.
#[derive(Debug, PartialEq, Eq)]
pub struct Taken {
    /// How many of them were looked at. The others are for later.
    pub consumed: usize,
    /// How many bytes of the connection were put out.
    pub produced: usize,
    /// A connection begins behind the bytes looked at.
    pub began: Option<[u8; NONCE]>,
}

impl Beginnings {
    pub fn new() -> Beginnings {
        Beginnings { phase: Phase::Between, matched: 0 }
    }

    /// The connection that began last has neither ended nor been followed by another.
    pub fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// Discard what comes until the next beginning.
    pub fn close(&mut self) {
        self.phase = Phase::Between;
    }

    /// Look at bytes until they are over, `out` is full, or something begins or ends.
    pub fn take(&mut self, bytes: &[u8], out: &mut [u8]) -> Taken {
        let (mut consumed, mut produced) = (0, 0);
        while let Some(&byte) = bytes.get(consumed) {
            if self.phase == Phase::Open {
                if produced == out.len() {
                    break;
                }
                if self.matched == 0 {
                    let rest = &bytes[consumed..];
                    let rest = &rest[..rest.len().min(out.len() - produced)];
                    let plain = rest.iter().position(|&byte| byte == MAGIC[0]).unwrap_or(rest.len());
                    if plain > 0 {
                        out[produced..produced + plain].copy_from_slice(&rest[..plain]);
                        consumed += plain;
                        produced += plain;
                        continue;
                    }
                }
            }
            consumed += 1;
            if self.matched == LAST {
                self.matched = 0;
                if byte == MAGIC[LAST] {
                    let ended = self.phase == Phase::Open;
                    self.phase = Phase::Nonce([0; NONCE], 0);
                    if ended {
                        break;
                    }
                }
                continue;
            }
            self.matched =
                if byte == MAGIC[self.matched] { self.matched + 1 } else { usize::from(byte == MAGIC[0]) };
            match &mut self.phase {
                Phase::Between => {}
                Phase::Open => {
                    out[produced] = byte;
                    produced += 1;
                }
                Phase::Nonce(nonce, have) => {
                    nonce[*have] = byte;
                    *have += 1;
                    if *have == NONCE {
                        let began = Some(*nonce);
                        self.phase = Phase::Open;
                        return Taken { consumed, produced, began };
                    }
                }
            }
        }
        Taken { consumed, produced, began: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What a client sends for these bytes, as `spec/wire.md` says it.
    fn stuffed(bytes: &[u8]) -> Vec<u8> {
        let mut sent = Vec::new();
        for &byte in bytes {
            sent.push(byte);
            if sent.ends_with(&MAGIC[..LAST]) {
                sent.push(0);
            }
        }
        sent
    }

    fn beginning(nonce: [u8; NONCE]) -> Vec<u8> {
        [&MAGIC[..], &nonce].concat()
    }

    /// Every connection of a stream that comes in pieces of some size: its nonce and its bytes.
    fn connections(stream: &[u8], piece: usize, room: usize) -> Vec<([u8; NONCE], Vec<u8>)> {
        let mut beginnings = Beginnings::new();
        let mut found: Vec<([u8; NONCE], Vec<u8>)> = Vec::new();
        for mut bytes in stream.chunks(piece) {
            while !bytes.is_empty() {
                let mut out = vec![0; room];
                let taken = beginnings.take(bytes, &mut out);
                assert!(taken.consumed > 0, "no progress");
                bytes = &bytes[taken.consumed..];
                if taken.produced > 0 {
                    found.last_mut().expect("bytes of no connection").1.extend(&out[..taken.produced]);
                }
                if let Some(nonce) = taken.began {
                    found.push((nonce, Vec::new()));
                }
            }
        }
        found
    }

    #[test]
    fn what_comes_before_a_beginning_is_discarded() {
        let stream = [&b"noise\xf5sandboxd-beg"[..], &beginning([7; NONCE]), b"hello"].concat();
        assert_eq!(connections(&stream, 1, 1), [([7; NONCE], b"hello".to_vec())]);
    }

    #[test]
    fn a_beginning_ends_what_came_before_it_wherever_that_was() {
        let stream = [
            &beginning([1; NONCE])[..],
            b"half a frame",
            &beginning([2; NONCE])[..20],
            &beginning([3; NONCE]),
            b"!",
        ]
        .concat();
        for piece in [1, 3, 1000] {
            let found = connections(&stream, piece, 5);
            // The bytes of a magic are the connection's until the last has come; then nobody wants them any more.
            assert_eq!(found[0], ([1; NONCE], [b"half a frame", &MAGIC[..LAST]].concat()));
            assert_eq!(found.last(), Some(&([3; NONCE], b"!".to_vec())));
            // A nonce that was cut off is answered with what came in its place, which its client knows not to be its own.
            assert_eq!((found.len(), &found[1].0[..]), (3, &[&[2; 4], &MAGIC[..12]].concat()[..]));
        }
    }

    #[test]
    fn data_with_the_magic_in_it_begins_nothing() {
        let data =
            [b"a", &MAGIC[..], &MAGIC[..LAST], &MAGIC[..LAST], b"\n", &MAGIC[..3], &MAGIC[..]].concat();
        let stream = [beginning([9; NONCE]), stuffed(&data)].concat();
        for piece in [1, 7, 4096] {
            assert_eq!(connections(&stream, piece, 3), [([9; NONCE], data.clone())]);
        }
    }

    #[test]
    fn vectors_channel() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../spec/vectors/wire/channel.json");
        let vectors: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let part = |of: &serde_json::Value| {
            let text = of.as_str().expect("hexadecimal digits");
            let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
            (0..text.len()).step_by(2).map(byte).collect::<Vec<u8>>()
        };
        assert_eq!(part(&vectors["magic_hex"]), MAGIC);
        for case in vectors["channel"].as_array().unwrap() {
            let nonce: [u8; NONCE] = part(&case["nonce_hex"]).try_into().unwrap();
            let stream = [part(&case["begin_hex"]), part(&case["sent_hex"])].concat();
            for piece in [1, stream.len()] {
                let found = connections(&stream, piece, 64);
                assert_eq!(found, [(nonce, part(&case["bytes_hex"]))], "{}", case["name"]);
            }
            assert_eq!([&MAGIC[..], &nonce].concat(), part(&case["echo_hex"]));
        }
    }

    #[test]
    fn a_closed_connection_is_over_until_the_next_begins() {
        let mut beginnings = Beginnings::new();
        let taken = beginnings.take(&beginning([4; NONCE]), &mut []);
        assert_eq!(taken, Taken { consumed: 32, produced: 0, began: Some([4; NONCE]) });
        beginnings.close();
        assert_eq!(beginnings.take(b"late", &mut [0; 8]), Taken { consumed: 4, produced: 0, began: None });
        assert!(!beginnings.is_open());
        assert_eq!(beginnings.take(&beginning([5; NONCE]), &mut []).began, Some([5; NONCE]));
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(
            parts in prop::collection::vec(
                prop_oneof![Just(MAGIC.to_vec()), Just(MAGIC[..LAST].to_vec()), prop::collection::vec(any::<u8>(), 0..20)],
                0..12,
            ),
            piece in 1..50usize,
            room in 1..50usize,
        ) {
            let data = parts.concat();
            let stream = [beginning([6; NONCE]), stuffed(&data)].concat();
            prop_assert_eq!(connections(&stream, piece, room), [([6; NONCE], data)]);
        }
    }
}
