//! Where an export's bytes go, and what a file's holes look like in them.

use crate::errors::Failure;
use crate::tarfmt::{MAX_EXTENTS, padding};
use crate::wire::{HEADER, Kind, MAX_PAYLOAD, header};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use tokio::sync::mpsc::Sender;

/// Why the export ended early.
#[derive(Debug)]
pub enum Stop {
    /// Nobody listens any more.
    Cancelled,
    Failed(Failure),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Stop {
        Stop::Failed(failure)
    }
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Stop {
        Stop::Failed(errno.into())
    }
}

/// The archive's bytes, gathered into frames.
pub struct Out {
    stream: u32,
    frames: Sender<Vec<u8>>,
    buffer: Vec<u8>,
}

impl Out {
    pub fn new(stream: u32, frames: Sender<Vec<u8>>) -> Out {
        Out { stream, frames, buffer: Vec::new() }
    }

    const FRAME: usize = HEADER + MAX_PAYLOAD;

    /// The place for the next bytes, at most `most` of them and never none.
    pub fn space(&mut self, most: u64) -> Result<&mut [u8], Stop> {
        if self.buffer.len() >= Out::FRAME {
            self.flush()?;
        }
        if self.buffer.is_empty() {
            self.buffer.reserve_exact(Out::FRAME);
            self.buffer.resize(HEADER, 0);
            self.buffer.push(1);
        }
        let start = self.buffer.len();
        let room = Out::FRAME - start;
        self.buffer.resize(start + room.min(usize::try_from(most).unwrap_or(room)), 0);
        Ok(&mut self.buffer[start..])
    }

    /// Give back what of [`Out::space`] was not used.
    pub fn unused(&mut self, count: usize) {
        self.buffer.truncate(self.buffer.len() - count);
    }

    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), Stop> {
        while !bytes.is_empty() {
            let space = self.space(bytes.len() as u64)?;
            let (now, later) = bytes.split_at(space.len());
            space.copy_from_slice(now);
            bytes = later;
        }
        Ok(())
    }

    pub fn zeros(&mut self, mut count: u64) -> Result<(), Stop> {
        while count > 0 {
            count -= self.space(count)?.len() as u64;
        }
        Ok(())
    }

    pub fn flush(&mut self) -> Result<(), Stop> {
        if self.buffer.len() > HEADER + 1 {
            let mut frame = std::mem::take(&mut self.buffer);
            let head = header(Kind::Data, self.stream, frame.len() - HEADER);
            frame[..HEADER].copy_from_slice(&head);
            self.frames.blocking_send(frame).map_err(|_| Stop::Cancelled)?;
        }
        Ok(())
    }
}

/// Where a file has data. `None` when it is whole or its file system does not say. Beyond [`MAX_EXTENTS`] the rest
/// counts as data, holes and all.
pub fn extents(file: &OwnedFd, size: u64) -> Option<Vec<(u64, u64)>> {
    let mut extents = Vec::new();
    let mut at = 0;
    while at < size {
        let data = match seek(file, SeekFrom::Data(at)) {
            Ok(data) => data.min(size),
            // No data until the end.
            Err(Errno::NXIO) => break,
            Err(_) => return None,
        };
        let hole = if extents.len() + 1 < MAX_EXTENTS {
            seek(file, SeekFrom::Hole(data)).ok()?.min(size)
        } else {
            size
        };
        if hole <= data {
            break;
        }
        extents.push((data, hole - data));
        at = hole;
    }
    (extents != [(0, size)]).then_some(extents)
}

/// The map of GNU's sparse format 1.0, filled up to whole blocks.
pub fn sparse_map(extents: &[(u64, u64)], size: u64) -> Vec<u8> {
    let ends_in_hole = extents.last().is_none_or(|(offset, length)| offset + length < size);
    let mut map = format!("{}\n", extents.len() + usize::from(ends_in_hole)).into_bytes();
    for (offset, length) in extents {
        map.extend_from_slice(format!("{offset}\n{length}\n").as_bytes());
    }
    if ends_in_hole {
        // GNU tar sets the size of the file by an empty piece at its end.
        map.extend_from_slice(format!("{size}\n0\n").as_bytes());
    }
    map.resize(map.len() + padding(map.len() as u64) as usize, 0);
    map
}
