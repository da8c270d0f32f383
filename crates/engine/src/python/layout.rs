//! `checkout`, `difference`, `verify` and `data_bytes` for Python.

use super::callbacks::{PyHost, PyIndex};
use super::{descriptor, detached, raise};
use crate::count::{data_bytes as count, data_bytes_after as count_after};
use crate::difference::difference as lay_out_difference;
use crate::error::{Error, Result};
use crate::format::{ID_BYTES, Id, Owner, decode_root};
use crate::host::{Client, Host, serve};
use crate::layout::{Options, checkout as lay_out};
use crate::read::{Location, Reader};
use crate::verify::verify as look;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// An id, then pack, offset and length as little-endian numbers of 64 bits.
const ROW: usize = ID_BYTES + 24;

fn open_packs(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty())
        .map_err(|error| Error::refused("open", error, path.as_os_str().as_encoded_bytes()))
}

fn one((uid, gid): (u32, u32)) -> Owner {
    Owner { uid, gid }
}

/// Serve the work, and tell the progress once more when it is done.
fn served<T: Send>(host: &mut PyHost, work: impl FnOnce(&Client) -> Result<T> + Send) -> Result<T> {
    let (answer, done) = serve(host, |client| Ok((work(&client)?, client.done.clone())))?;
    host.pulse(&done)?;
    Ok(answer)
}

/// See `ports.Engine.checkout`; `root` as `objects.encode_root` makes it. `locate` is a method of `ports.Objects`, which
/// is called from this thread alone.
#[pyfunction]
#[pyo3(signature = (root, directory, packs, locate, *, owners, owner, threads, progress))]
#[allow(clippy::too_many_arguments)]
pub fn checkout(
    py: Python<'_>,
    root: Vec<u8>,
    directory: i32,
    packs: PathBuf,
    locate: Py<PyAny>,
    owners: bool,
    owner: Option<(u32, u32)>,
    threads: usize,
    progress: Option<Py<PyAny>>,
) -> PyResult<()> {
    let counted = progress.is_some();
    let mut host = PyHost::new(locate, None, progress);
    detached(py, || {
        let (directory, packs, root) = (descriptor(directory)?, open_packs(&packs)?, decode_root(&root)?);
        let options = Options { owners, owner: owner.map(one), threads, counted };
        served(&mut host, |client| {
            lay_out(&Reader::new(packs, client), &root, directory.as_fd(), options, client)
        })
    })
    .map_err(raise)
}

/// See `ports.Engine.difference`; arguments as of `checkout`.
#[pyfunction]
#[pyo3(signature = (old, new, directory, packs, locate, *, owners, owner, threads))]
#[allow(clippy::too_many_arguments)]
pub fn difference(
    py: Python<'_>,
    old: Vec<u8>,
    new: Vec<u8>,
    directory: i32,
    packs: PathBuf,
    locate: Py<PyAny>,
    owners: bool,
    owner: Option<(u32, u32)>,
    threads: usize,
) -> PyResult<()> {
    let mut host = PyHost::new(locate, None, None);
    detached(py, || {
        let (directory, packs) = (descriptor(directory)?, open_packs(&packs)?);
        let (old, new) = (decode_root(&old)?, decode_root(&new)?);
        let options = Options { owners, owner: owner.map(one), threads, counted: false };
        served(&mut host, |client| {
            lay_out_difference(&Reader::new(packs, client), &old, &new, directory.as_fd(), options, client)
        })
    })
    .map_err(raise)
}

/// See `ports.Engine.data_bytes`; `known` is a root and its count. It works on this thread.
#[pyfunction]
#[pyo3(signature = (root, packs, locate, *, known))]
pub fn data_bytes(
    py: Python<'_>,
    root: Vec<u8>,
    packs: PathBuf,
    locate: Py<PyAny>,
    known: Option<(Vec<u8>, i128)>,
) -> PyResult<i128> {
    let index = PyIndex(locate);
    detached(py, || {
        let reader = Reader::new(open_packs(&packs)?, &index);
        let new = decode_root(&root)?;
        match &known {
            None => count(&reader, &new),
            Some((old, total)) => count_after(&reader, &decode_root(old)?, *total, &new),
        }
    })
    .map_err(raise)
}

/// What a record is: kind, canonical length, base and depth of its patch. Or why it is damaged.
type Seen<'py> = (Option<(u8, usize, Option<Bound<'py, PyBytes>>, u8)>, Option<String>);

/// Read and decode records, with what they are patches of. `rows` holds for each its id, then pack, offset and length
/// as little-endian numbers of 64 bits; a base that is not among them is asked for by `locate`.
#[pyfunction]
#[pyo3(signature = (rows, packs, locate, *, threads, progress))]
pub fn verify<'py>(
    py: Python<'py>,
    rows: Vec<u8>,
    packs: PathBuf,
    locate: Py<PyAny>,
    threads: usize,
    progress: Option<Py<PyAny>>,
) -> PyResult<Vec<Seen<'py>>> {
    let mut host = PyHost::new(locate, None, progress);
    let seen = detached(py, || {
        let (rows, packs) = (parse(&rows)?, open_packs(&packs)?);
        let options = Options { threads, ..Options::default() };
        served(&mut host, |client| look(packs, &rows, options, client))
    })
    .map_err(raise)?;
    let seen = seen.into_iter().map(|seen| match seen {
        Ok(header) => {
            let base = header.base.map(|id| PyBytes::new(py, &id));
            (Some((header.kind as u8, header.canonical, base, header.depth)), None)
        }
        Err(why) => (None, Some(why)),
    });
    Ok(seen.collect())
}

fn parse(rows: &[u8]) -> Result<Vec<(Id, Location)>> {
    let (rows, rest) = rows.as_chunks::<ROW>();
    if !rest.is_empty() {
        return Err(Error::Invalid("rows of another length".to_owned()));
    }
    let number = |row: &[u8; ROW], at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&row[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    Ok(rows
        .iter()
        .map(|row| {
            let mut id = [0; ID_BYTES];
            id.copy_from_slice(&row[..ID_BYTES]);
            let (pack, offset, length) = (number(row, 32), number(row, 40), number(row, 48));
            (id, Location { pack, offset, length })
        })
        .collect())
}
