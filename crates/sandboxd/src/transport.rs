//! What carries a connection: a socket, or a machine's port.

use crate::machine::port::Port;
use std::future::pending;
use std::io::{self, IoSlice};
use std::rc::Rc;
use tokio::net::UnixStream;

pub enum Transport {
    Socket(UnixStream),
    Port(Rc<Port>),
}

impl Transport {
    pub async fn readable(&self) -> io::Result<()> {
        match self {
            Transport::Socket(socket) => socket.readable().await,
            Transport::Port(port) => port.readable().await,
        }
    }

    pub async fn writable(&self) -> io::Result<()> {
        match self {
            Transport::Socket(socket) => socket.writable().await,
            Transport::Port(port) => port.writable().await,
        }
    }

    /// 0 when the connection is over.
    pub fn try_read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Transport::Socket(socket) => socket.try_read(bytes),
            Transport::Port(port) => port.try_read(bytes),
        }
    }

    pub fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Transport::Socket(socket) => socket.try_write_vectored(slices),
            Transport::Port(port) => port.try_write_vectored(slices),
        }
    }

    /// Wait for an end that reading does not tell.
    pub async fn abandoned(&self) {
        match self {
            Transport::Socket(_) => pending().await,
            Transport::Port(port) => port.abandoned().await,
        }
    }
}
