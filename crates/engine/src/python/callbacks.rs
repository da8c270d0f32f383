//! The caller in Python as a [`Host`]: bound methods of `ports.Objects` and `ports.Writer`, signals, progress.

use crate::error::{Error, Result};
use crate::format::Id;
use crate::host::{Done, Host, Records};
use crate::read::{Locate, Location};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use std::sync::atomic::{AtomicU64, Ordering};

fn locations(locate: &Py<PyAny>, ids: &[Id]) -> Result<Vec<Option<Location>>> {
    Python::attach(|py| -> PyResult<_> {
        let found = locate.bind(py).call1((list(py, ids)?,))?;
        let mut places = Vec::with_capacity(ids.len());
        for place in found.try_iter()? {
            let place = place?;
            let number = |name| place.getattr(name)?.extract::<u64>();
            places.push(if place.is_none() {
                None
            } else {
                Some(Location { pack: number("pack")?, offset: number("offset")?, length: number("length")? })
            });
        }
        Ok(places)
    })
    .map_err(foreign)
}

/// The index for work on the thread that called; each question looks for signals too.
pub struct PyIndex(pub Py<PyAny>);

impl Locate for PyIndex {
    fn locate(&self, ids: &[Id]) -> Result<Vec<Option<Location>>> {
        Python::attach(|py| py.check_signals()).map_err(foreign)?;
        locations(&self.0, ids)
    }
}

/// What a capture writes to.
pub struct PyWriter {
    pub has: Py<PyAny>,
    pub append: Py<PyAny>,
    /// The class `ports.Row`.
    pub row: Py<PyAny>,
}

/// The caller. It holds the interpreter for the length of each call alone.
pub struct PyHost {
    locate: Py<PyAny>,
    writer: Option<PyWriter>,
    progress: Option<Py<PyAny>>,
}

fn foreign(error: PyErr) -> Error {
    Error::Foreign(Box::new(error))
}

fn list<'py>(py: Python<'py>, ids: &[Id]) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, ids.iter().map(|id| PyBytes::new(py, id)))
}

impl PyHost {
    /// Without a writer nothing may be appended.
    pub fn new(locate: Py<PyAny>, writer: Option<PyWriter>, progress: Option<Py<PyAny>>) -> PyHost {
        PyHost { locate, writer, progress }
    }

    fn writer(&self) -> Result<&PyWriter> {
        self.writer.as_ref().ok_or_else(|| Error::Internal("there is no writer".to_owned()))
    }
}

impl Host for PyHost {
    fn locate(&mut self, ids: &[Id]) -> Result<Vec<Option<Location>>> {
        locations(&self.locate, ids)
    }

    fn has(&mut self, ids: &[Id]) -> Result<Vec<bool>> {
        let writer = self.writer()?;
        let held = Python::attach(|py| writer.has.bind(py).call1((list(py, ids)?,))?.extract::<Vec<bool>>())
            .map_err(foreign)?;
        if held.len() != ids.len() {
            return Err(Error::Invalid("an answer for each id is wanted".to_owned()));
        }
        Ok(held)
    }

    fn append(&mut self, records: &Records) -> Result<()> {
        let writer = self.writer()?;
        Python::attach(|py| -> PyResult<()> {
            let class = writer.row.bind(py);
            let rows = PyList::empty(py);
            for row in &records.rows {
                let base = row.base.as_ref().map(|id| PyBytes::new(py, id));
                rows.append(class.call1((
                    PyBytes::new(py, &row.id),
                    row.offset,
                    row.length,
                    base,
                    row.depth,
                ))?)?;
            }
            writer.append.bind(py).call1((PyBytes::new(py, &records.bytes), rows))?;
            Ok(())
        })
        .map_err(foreign)
    }

    fn pulse(&mut self, done: &Done) -> Result<()> {
        Python::attach(|py| -> PyResult<()> {
            py.check_signals()?;
            if let Some(progress) = &self.progress {
                let count = |value: &AtomicU64| value.load(Ordering::Relaxed);
                let (files, bytes) = (count(&done.files_in_all), count(&done.bytes_in_all));
                // What is read twice, or grew, is no progress beyond what was seen first.
                let most =
                    |value: &AtomicU64, all: u64| if all > 0 { count(value).min(all) } else { count(value) };
                progress.bind(py).call1((
                    most(&done.files, files),
                    files,
                    most(&done.bytes, bytes),
                    bytes,
                ))?;
            }
            Ok(())
        })
        .map_err(foreign)
    }
}
