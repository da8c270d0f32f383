//! The newest output of one command: a ring over both channels, addressed by a cursor.
//!
//! Bytes are numbered from 0 in the order in which they were put in. They lie in pieces of [`PIECE`] bytes, each with
//! one bit for each byte that says which of the two channels it came on: a command that changes the channel with
//! every byte costs an eighth more memory and not many times as much. Pure: no clock, no descriptor, no lock.

use std::collections::VecDeque;

/// What one command may keep.
pub const RING: usize = 1 << 20;
const PIECE: usize = 4_096;

#[derive(Default)]
struct Piece {
    bytes: Vec<u8>,
    /// Bit n is set where byte n came on channel 2.
    second: Vec<u64>,
}

impl Piece {
    fn is_second(&self, at: usize) -> bool {
        self.second.get(at / 64).is_some_and(|word| word >> (at % 64) & 1 == 1)
    }

    fn push(&mut self, channel: u8, bytes: &[u8]) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        self.second.resize(self.bytes.len().div_ceil(64), 0);
        if channel == 2 {
            for at in start..self.bytes.len() {
                self.second[at / 64] |= 1 << (at % 64);
            }
        }
    }

    /// How many bytes from `at` on are of the same channel.
    fn run(&self, at: usize) -> usize {
        let second = self.is_second(at);
        (at..self.bytes.len()).take_while(|&other| self.is_second(other) == second).count()
    }
}

#[derive(Default)]
pub struct Ring {
    pieces: VecDeque<Piece>,
    /// The cursor of the first byte of the first piece; every piece but the last is full.
    base: u64,
    first: u64,
    end: u64,
}

impl Ring {
    /// The oldest byte that is still here.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// The number of the byte that comes next.
    pub fn end(&self) -> u64 {
        self.end
    }

    pub fn len(&self) -> usize {
        (self.end - self.first) as usize
    }

    /// Add output of channel 1 or 2 and drop what is above [`RING`].
    pub fn push(&mut self, channel: u8, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.pieces.back().is_none_or(|last| last.bytes.len() == PIECE) {
                self.pieces.push_back(Piece::default());
            }
            if let Some(last) = self.pieces.back_mut() {
                let (now, later) = bytes.split_at(bytes.len().min(PIECE - last.bytes.len()));
                last.push(channel, now);
                self.end += now.len() as u64;
                bytes = later;
            }
        }
        self.drop_oldest(self.len().saturating_sub(RING));
    }

    /// Forget that many of the oldest bytes.
    pub fn drop_oldest(&mut self, count: usize) {
        self.first = self.first.saturating_add(count as u64).min(self.end);
        while let Some(piece) = self.pieces.front() {
            let end = self.base + piece.bytes.len() as u64;
            // A piece that is not full is the last one, so nothing is kept when it goes.
            if end > self.first {
                break;
            }
            self.base = end;
            self.pieces.pop_front();
        }
    }

    /// Up to `most` bytes of one channel from a cursor on that lies in the ring. `None` at the end.
    pub fn read(&self, cursor: u64, most: usize) -> Option<(u8, Vec<u8>)> {
        if cursor < self.first || cursor >= self.end || most == 0 {
            return None;
        }
        let mut at = (cursor - self.base) as usize;
        let second = self.pieces[at / PIECE].is_second(at % PIECE);
        let mut bytes = Vec::new();
        while let Some(piece) = self.pieces.get(at / PIECE) {
            let inside = at % PIECE;
            if inside >= piece.bytes.len() || piece.is_second(inside) != second || bytes.len() == most {
                break;
            }
            let count = piece.run(inside).min(most - bytes.len());
            bytes.extend_from_slice(&piece.bytes[inside..inside + count]);
            at += count;
        }
        Some((if second { 2 } else { 1 }, bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_newest_mebibyte_is_kept_and_numbers_go_on() {
        let mut ring = Ring::default();
        let bytes: Vec<u8> = (0..3 * RING as u32 / 2).map(|n| (n ^ n >> 8) as u8).collect();
        for piece in bytes.chunks(10_007) {
            ring.push(1, piece);
        }
        assert_eq!((ring.end(), ring.len()), (bytes.len() as u64, RING));
        assert_eq!(ring.first(), (bytes.len() - RING) as u64);
        assert_eq!(ring.read(ring.first() - 1, 10), None, "gone");
        assert_eq!(ring.read(ring.end(), 10), None, "not there yet");
        let (channel, all) = ring.read(ring.first(), usize::MAX).unwrap();
        assert!(channel == 1 && all == bytes[bytes.len() - RING..]);
        assert!(ring.pieces.len() <= RING / PIECE + 1);
        ring.drop_oldest(RING);
        assert_eq!((ring.len(), ring.pieces.len(), ring.first()), (0, 0, ring.end()));
        ring.push(2, b"more");
        assert_eq!(ring.read(ring.first(), 100), Some((2, b"more".to_vec())));
    }

    proptest! {
        #[test]
        fn it_is_the_tail_of_what_was_put_in(
            steps in proptest::collection::vec((1u8..3, proptest::collection::vec(any::<u8>(), 0..9_000), 0usize..9_000), 0..30),
            most in 1usize..6_000,
        ) {
            let mut ring = Ring::default();
            let mut all: Vec<(u8, u8)> = Vec::new();
            let mut first = 0;
            for (channel, bytes, drop) in steps {
                ring.push(channel, &bytes);
                all.extend(bytes.iter().map(|&byte| (channel, byte)));
                if drop % 3 == 0 {
                    ring.drop_oldest(drop);
                    first = (first + drop).min(all.len());
                }
                prop_assert_eq!((ring.first(), ring.end()), (first as u64, all.len() as u64));
                let mut cursor = ring.first();
                let mut seen = Vec::new();
                while let Some((channel, bytes)) = ring.read(cursor, most) {
                    prop_assert!(!bytes.is_empty() && bytes.len() <= most);
                    cursor += bytes.len() as u64;
                    seen.extend(bytes.into_iter().map(|byte| (channel, byte)));
                }
                prop_assert_eq!(&seen[..], &all[first..]);
            }
        }
    }
}
