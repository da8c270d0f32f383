//! The engine of the versioned store: the byte work over directory trees, outside the interpreter.
//!
//! `spec/store.md` is the source of every byte, `src/agent_sandbox/store/` the reference in Python. The engine never
//! opens the index, nor a pack for writing: it asks where objects are and hands whole records over.

pub mod error;
pub mod format;
#[cfg(feature = "python")]
mod python;
pub mod read;
pub mod record;
#[cfg(test)]
mod testing;
