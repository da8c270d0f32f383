//! What can go wrong in the engine, named after the caller's situation as `agent_sandbox.errors` does.
//!
//! No interpreter in here: `python.rs` turns these into exceptions.

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
    /// The system refused: `OSError`. The path is relative to the directory that was given, as bytes.
    Io { error: io::Error, path: Vec<u8> },
    /// What a callback raised, handed through unchanged.
    Foreign(Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    pub fn damaged(what: impl Into<String>) -> Error {
        Error::Damaged(what.into())
    }

    pub fn io(error: impl Into<io::Error>, path: &[u8]) -> Error {
        Error::Io { error: error.into(), path: path.to_vec() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Damaged(text) | Error::Invalid(text) | Error::Conflict(text) => f.write_str(text),
            Error::Io { error, path } => write!(f, "{error}: {}", path.escape_ascii()),
            Error::Foreign(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Error {}
