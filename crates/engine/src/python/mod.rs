//! The face towards Python: `agent_sandbox_engine._native`, which `agent_sandbox.store.native` alone uses.
//!
//! Every failure of the engine is one exception, [`EngineError`], with the code of the class in `agent_sandbox.errors`
//! that it means; what a callback raised comes out as it was.

mod callbacks;
mod capture;
mod layout;

use crate::error::{Error, Result};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use std::os::fd::{FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

pyo3::create_exception!(
    _native,
    EngineError,
    PyException,
    "A failure: the code of its class, and a message."
);

/// The codes of [`EngineError`].
const CODES: [&str; 7] = [
    "store_error",
    "store_damaged",
    "invalid_request",
    "conflict",
    "forbidden",
    "limit_exceeded",
    "store_full",
];

/// The exception that an error means.
fn raise(error: Error) -> PyErr {
    let error = match error {
        Error::Foreign(foreign) => match foreign.downcast::<PyErr>() {
            Ok(error) => return *error,
            Err(foreign) => Error::Foreign(foreign),
        },
        error => error,
    };
    let code = CODES[match &error {
        Error::Unfit(_) | Error::Io { .. } | Error::Foreign(_) | Error::Stopped | Error::Internal(_) => 0,
        Error::Damaged(_) => 1,
        Error::Invalid(_) => 2,
        Error::Conflict(_) | Error::Refused(_) => 3,
        Error::Forbidden(_) => 4,
        Error::Limit(_) => 5,
        Error::Full(_) => 6,
    }];
    EngineError::new_err((code, error.to_string()))
}

/// Work without the interpreter. A panic is a fault of ours, not the end of the process.
fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    py.detach(|| {
        catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(Error::panicked(panic.as_ref())))
    })
}

/// A descriptor of our own for the file that `number` is one of, so that nobody closes it under our hands.
fn descriptor(number: i32) -> Result<OwnedFd> {
    // SAFETY: the call takes any number and touches no memory.
    let own = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
    if own < 0 {
        return Err(Error::io(std::io::Error::last_os_error(), b""));
    }
    // SAFETY: the descriptor was made just now, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(own) })
}

/// Where the chunk that begins at `start` ends, `end` being where the run of data ends; see `chunks.cut`.
#[pyfunction]
fn cut(data: PyBuffer<u8>, start: usize, end: usize) -> PyResult<usize> {
    let length = end.min(start.saturating_add(crate::chunk::MAX)).saturating_sub(start);
    let Some(bytes) =
        data.as_slice_ptr().filter(|bytes| start <= bytes.len() && length <= bytes.len() - start)
    else {
        return Err(PyValueError::new_err("outside of the buffer, or it is not contiguous"));
    };
    let mut copy = vec![0; length];
    // SAFETY: the range is inside the buffer, which `data` keeps from moving. The bytes may be anything, and they are
    // copied while the interpreter is held, before they are looked at.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.cast::<u8>().as_ptr().add(start), copy.as_mut_ptr(), length)
    };
    Ok(start + crate::chunk::cut(&copy))
}

#[pymodule]
mod _native {
    #[pymodule_export]
    const CODES: [&str; 7] = super::CODES;
    #[pymodule_export]
    use super::EngineError;
    #[pymodule_export]
    use super::capture::capture;
    #[pymodule_export]
    use super::cut;
    #[pymodule_export]
    use super::layout::{checkout, data_bytes, difference, verify};
}
