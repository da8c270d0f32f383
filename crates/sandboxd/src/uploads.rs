//! The names that files have while they are uploaded.
//!
//! A file is written under a name of the daemon's beside its place and renamed when it is whole. Nobody is told of
//! that name: no listing, archive or watch has it. It is known by its form alone, so that one which a daemon left that
//! was killed is hidden too; a command that gives a file such a name hides its own file.
//!
//! A watch sees the rename. Whether the name was taken before no event of the kernel says, so who renames notes it
//! down first.

use crate::daemon::fill_random;
use rustix::fs::FileType;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

const PREFIX: &[u8] = b".asb-";
const SUFFIX: &[u8] = b".tmp";
/// Uploads between a rename and the moment that a watch reads of it; one that is forgotten counts as new.
const MAX_NOTED: usize = 4_096;

/// The number of an upload, which is its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Number(u64);

impl Number {
    pub fn fresh() -> rustix::io::Result<Number> {
        let mut random = [0u8; 8];
        fill_random(&mut random)?;
        Ok(Number(u64::from_ne_bytes(random)))
    }

    pub fn name(self) -> Vec<u8> {
        format!(".asb-{:016x}.tmp", self.0).into_bytes()
    }

    fn of(name: &[u8]) -> Option<Number> {
        let digits = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
        let number = Number(u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
        // Not every text that is a number is how we write it.
        (number.name() == name).then_some(number)
    }
}

/// Whether a name is that of a file being uploaded.
pub fn is_unfinished(name: &[u8], kind: FileType) -> bool {
    kind.is_file() && Number::of(name).is_some()
}

/// The uploads that took the place of another file.
#[derive(Default)]
pub struct Replacing(Mutex<VecDeque<Number>>);

impl Replacing {
    pub fn note(&self, number: Number) {
        let mut noted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if noted.len() >= MAX_NOTED {
            noted.pop_front();
        }
        noted.push_back(number);
    }

    /// What the rename of an unfinished file means for the name that it got.
    pub fn change(&self, unfinished: &[u8]) -> &'static str {
        let noted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match Number::of(unfinished) {
            Some(number) if noted.contains(&number) => "modified",
            _ => "created",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_known_by_its_form() {
        let number = Number(0x0123_4567_89ab_cdef);
        assert_eq!(number.name(), b".asb-0123456789abcdef.tmp");
        assert_eq!(Number::of(&number.name()), Some(number));
        assert_eq!(Number::of(&Number(7).name()), Some(Number(7)));
        assert!(is_unfinished(&number.name(), FileType::RegularFile));
        assert!(!is_unfinished(&number.name(), FileType::Directory));
        for other in [
            ".asb-123456789abcdef.tmp",
            ".asb-00123456789abcdef.tmp",
            ".asb-0123456789ABCDEF.tmp",
            ".asb-+123456789abcdef.tmp",
            ".asb-0123456789abcdef.tmp~",
            "asb-0123456789abcdef.tmp",
            ".asb-.tmp",
            ".asb-tmp",
            "",
        ] {
            assert_eq!(Number::of(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn only_the_newest_are_kept_in_mind() {
        let replacing = Replacing::default();
        for number in 0..=MAX_NOTED as u64 {
            replacing.note(Number(number));
        }
        assert_eq!(replacing.change(&Number(0).name()), "created");
        assert_eq!(replacing.change(&Number(1).name()), "modified");
        assert_eq!(replacing.change(&Number(MAX_NOTED as u64).name()), "modified");
        assert_eq!(replacing.change(b"another"), "created");
        assert_eq!(replacing.0.lock().unwrap().len(), MAX_NOTED);
    }
}
