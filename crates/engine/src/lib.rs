//! The engine of the versioned store: the byte work over directory trees, outside the interpreter.
//!
//! `spec/store.md` is the source of every byte, `src/agent_sandbox/store/` the reference in Python. The engine never
//! opens the index, nor a pack for writing: it asks where objects are and hands whole records over.

pub mod attributes;
pub mod capture;
pub mod chunk;
pub mod count;
pub mod difference;
pub mod error;
pub mod format;
pub mod host;
pub mod layout;
pub mod open;
pub mod pages;
#[cfg(feature = "python")]
mod python;
pub mod read;
pub mod record;
pub mod scan;
pub mod sink;
pub mod statcache;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod vectors;
pub mod verify;
