//! Every error that an operation can answer, and the one table from the kernel's numbers to them.

use crate::wire::{error_inner, error_map};
use rustix::io::Errno;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    InvalidRequest,
    NotFound,
    Workdir,
    Permission,
    Conflict,
    TooLarge,
    NoSpace,
    Exhausted,
    Stuck,
    Unsupported,
    Internal,
}

impl Code {
    pub fn name(self) -> &'static str {
        match self {
            Code::InvalidRequest => "invalid_request",
            Code::NotFound => "not_found",
            Code::Workdir => "workdir",
            Code::Permission => "permission",
            Code::Conflict => "conflict",
            Code::TooLarge => "too_large",
            Code::NoSpace => "no_space",
            Code::Exhausted => "exhausted",
            Code::Stuck => "stuck",
            Code::Unsupported => "unsupported",
            Code::Internal => "internal",
        }
    }

    pub fn of(errno: Errno) -> Code {
        match errno {
            Errno::NOENT => Code::NotFound,
            Errno::ACCESS | Errno::PERM | Errno::ROFS => Code::Permission,
            Errno::EXIST | Errno::NOTEMPTY => Code::Conflict,
            Errno::NOSPC | Errno::DQUOT => Code::NoSpace,
            Errno::FBIG => Code::TooLarge,
            Errno::NAMETOOLONG | Errno::LOOP | Errno::NOTDIR | Errno::ISDIR | Errno::TOOBIG => {
                Code::InvalidRequest
            }
            Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::AGAIN => Code::Exhausted,
            _ => Code::Internal,
        }
    }
}

/// What an operation answers instead of its result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub code: Code,
    pub message: String,
}

impl Failure {
    pub fn new(code: Code, message: impl Into<String>) -> Failure {
        Failure { code, message: message.into() }
    }

    pub fn invalid(message: impl Into<String>) -> Failure {
        Failure::new(Code::InvalidRequest, message)
    }

    /// `{code, message}`.
    pub fn inner(&self) -> Vec<u8> {
        error_inner(self.code.name(), &self.message)
    }

    /// The encoded END map.
    pub fn map(&self) -> Vec<u8> {
        error_map(self.code.name(), &self.message)
    }
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Failure {
        Failure::new(Code::of(errno), words(errno.raw_os_error()))
    }
}

/// The system's words for an error number.
pub fn words(errno: i32) -> String {
    let text = std::io::Error::from_raw_os_error(errno).to_string();
    match text.rfind(" (os error") {
        Some(end) => text[..end].to_string(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_the_one_of_the_page() {
        for (errno, code) in [
            (Errno::NOENT, "not_found"),
            (Errno::ACCESS, "permission"),
            (Errno::PERM, "permission"),
            (Errno::EXIST, "conflict"),
            (Errno::NOTEMPTY, "conflict"),
            (Errno::NOSPC, "no_space"),
            (Errno::DQUOT, "no_space"),
            (Errno::NAMETOOLONG, "invalid_request"),
            (Errno::LOOP, "invalid_request"),
            (Errno::NOTDIR, "invalid_request"),
            (Errno::ISDIR, "invalid_request"),
            (Errno::MFILE, "exhausted"),
            (Errno::NFILE, "exhausted"),
            (Errno::NOMEM, "exhausted"),
            (Errno::AGAIN, "exhausted"),
            (Errno::IO, "internal"),
        ] {
            assert_eq!(Failure::from(errno).code.name(), code, "{errno:?}");
        }
        assert_eq!(words(2), "No such file or directory");
    }
}
