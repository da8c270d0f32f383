//! What can go wrong in the engine, named after the caller's situation as `agent_sandbox.errors` does.
//!
//! No interpreter in here: `python/mod.rs` turns these into exceptions.

use rustix::io::Errno;
use std::any::Any;
use std::fmt;
use std::io;

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug)]
pub enum Error {
    /// Bytes that the store kept are not what a writer writes: `StoreDamagedError`.
    Damaged(String),
    /// The caller asked for something that cannot be right: `InvalidRequestError`.
    Invalid(String),
    /// Something changed under our hands: `ConflictError`.
    Conflict(String),
    /// The upper directory of an overlay does not tell the state: `OverlayRefusedError`.
    Refused(String),
    /// The rights of the caller do not allow it: `ForbiddenError`.
    Forbidden(String),
    /// A quota of this process is used up: `LimitExceededError`.
    Limit(String),
    /// A disk is full, or a quota of it used up: `StoreFullError`.
    Full(String),
    /// What was to be kept or laid out does not fit this file system: `StoreError`.
    Unfit(String),
    /// The system refused: `StoreError`. The path is relative to the directory that was given, as bytes.
    Io { error: io::Error, path: Vec<u8> },
    /// What a callback raised, handed through unchanged.
    Foreign(Box<dyn std::error::Error + Send + Sync>),
    /// The work was ended from outside; what ended it says why.
    Stopped,
    /// A fault of the engine's own.
    Internal(String),
}

impl Error {
    pub fn damaged(what: impl Into<String>) -> Error {
        Error::Damaged(what.into())
    }

    pub fn io(error: impl Into<io::Error>, path: &[u8]) -> Error {
        Error::Io { error: error.into(), path: path.to_vec() }
    }

    /// What an error of the system means where a tree is laid out: the table of `store/oserrors.py`.
    ///
    /// `doing` is a verb, `path` relative to the directory that was given.
    pub fn refused(doing: &str, error: Errno, path: &[u8]) -> Error {
        let text = format!("cannot {doing} {}: {}", shown(path), io::Error::from(error));
        match error {
            Errno::NOSPC | Errno::DQUOT => Error::Full(text),
            Errno::ACCESS | Errno::PERM | Errno::ROFS => Error::Forbidden(text),
            Errno::MFILE | Errno::NFILE => Error::Limit(text),
            // Somebody else changes the same directory.
            Errno::EXIST
            | Errno::NOENT
            | Errno::NOTDIR
            | Errno::ISDIR
            | Errno::NOTEMPTY
            | Errno::LOOP
            | Errno::STALE => Error::Conflict(text),
            _ => Error::Unfit(text),
        }
    }

    /// The error for what a thread panicked with.
    pub fn panicked(panic: &(dyn Any + Send)) -> Error {
        let text =
            panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
        Error::Internal(text.unwrap_or("a panic without a message").to_string())
    }
}

/// A path as messages show it: printable and at most about 400 bytes.
pub fn shown(path: &[u8]) -> String {
    if path.is_empty() {
        return "the directory itself".to_owned();
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).escape_debug().to_string();
    if path.len() <= 400 {
        return text(path);
    }
    format!("{}…{}", text(&path[..200]), text(&path[path.len() - 200..]))
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Damaged(text)
            | Error::Invalid(text)
            | Error::Conflict(text)
            | Error::Refused(text)
            | Error::Forbidden(text)
            | Error::Limit(text)
            | Error::Full(text)
            | Error::Unfit(text) => f.write_str(text),
            Error::Io { error, path } => write!(f, "{}: {error}", path.escape_ascii()),
            Error::Foreign(error) => error.fmt(f),
            Error::Stopped => f.write_str("stopped"),
            Error::Internal(text) => write!(f, "a fault of the engine: {text}"),
        }
    }
}

impl std::error::Error for Error {}
