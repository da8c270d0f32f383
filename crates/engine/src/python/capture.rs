//! `capture` for Python.

use super::callbacks::{PyHost, PyWriter};
use super::{descriptor, detached, raise};
use crate::capture::{Request, capture as run};
use crate::error::Error;
use crate::scan::Left;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rustix::fs::{Mode, OFlags};
use std::os::fd::AsFd;
use std::path::PathBuf;

/// An answer, or why the upper directory of an overlay does not give one.
#[derive(IntoPyObject)]
pub enum Outcome<'py> {
    Captured(Answer<'py>),
    Refused(String),
}

/// Root entry; files, directories, symlinks, FIFOs, bytes, read; what was left out; how much that is.
type Answer<'py> =
    (Bound<'py, PyBytes>, (u64, u64, u64, u64, u64, u64), Vec<(Bound<'py, PyBytes>, &'static str)>, u64);

/// See `ports.Engine.capture`. `locate`, `has` and `append` are methods of `ports.Objects` and `ports.Writer`,
/// `row` is the class `ports.Row`; all are called from this thread alone.
#[pyfunction]
#[pyo3(signature = (directory, packs, locate, has, append, row, *, base, lower, cache, overlay, owners, threads, progress))]
#[allow(clippy::too_many_arguments)]
pub fn capture<'py>(
    py: Python<'py>,
    directory: i32,
    packs: PathBuf,
    locate: Py<PyAny>,
    has: Py<PyAny>,
    append: Py<PyAny>,
    row: Py<PyAny>,
    base: Option<Vec<u8>>,
    lower: Option<i32>,
    cache: Option<PathBuf>,
    overlay: bool,
    owners: bool,
    threads: usize,
    progress: Option<Py<PyAny>>,
) -> PyResult<Outcome<'py>> {
    let mut host = PyHost::new(locate, Some(PyWriter { has, append, row }), progress);
    let captured = detached(py, || {
        let directory = descriptor(directory)?;
        let lower = lower.map(descriptor).transpose()?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let packs = rustix::fs::open(&packs, flags, Mode::empty())
            .map_err(|errno| Error::io(errno, packs.as_os_str().as_encoded_bytes()))?;
        let request = Request {
            directory: directory.as_fd(),
            lower: lower.as_ref().map(AsFd::as_fd),
            packs,
            base: base.as_deref(),
            cache: cache.as_deref(),
            overlay,
            owners,
            threads,
        };
        run(&mut host, &request)
    });
    let captured = match captured {
        Err(Error::Refused(why)) => return Ok(Outcome::Refused(why)),
        captured => captured.map_err(raise)?,
    };
    let report = captured.report;
    let left = report.left_out.paths.iter();
    Ok(Outcome::Captured((
        PyBytes::new(py, &captured.root),
        (report.files, report.directories, report.symlinks, report.fifos, report.bytes, report.read),
        left.map(|(path, why): &(Vec<u8>, Left)| (PyBytes::new(py, path), why.word())).collect(),
        report.left_out.count,
    )))
}
