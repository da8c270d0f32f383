//! The face towards Python: `agent_sandbox_engine._native`.

use pyo3::prelude::*;

#[pymodule]
mod _native {}
