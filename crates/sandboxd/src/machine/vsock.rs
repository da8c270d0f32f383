//! Connections from the host by vsock(7), where a machine has such a device: sockets as any others.
//!
//! Only the host is let in. No command can make such a socket (`seccomp.rs`); and one that could would reach the host, or,
//! with a loopback transport, which the initramfs does not have, itself under another number.

use rustix::io::Errno;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::time::sleep;

/// Where the daemon listens, on whatever number the machine has.
pub const PORT: u32 = 1024;
const BACKLOG: libc::c_int = 16;
/// After a failure for want of descriptors or memory: a connection that ends gives some back.
const PAUSE: Duration = Duration::from_millis(20);

/// Listen, before anything else can take the port.
pub fn listen() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointer is given.
    let socket = unsafe { libc::socket(libc::AF_VSOCK, kind, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given it, and nobody else has it.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    // SAFETY: zeros are a valid address.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_port = PORT;
    address.svm_cid = libc::VMADDR_CID_ANY;
    let size = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
    // SAFETY: the kernel reads an address of that size.
    let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size) };
    // SAFETY: no pointer is given.
    if bound < 0 || unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(socket)
}

pub struct Listener(AsyncFd<OwnedFd>);

impl Listener {
    /// Take what [`listen`] made.
    pub fn new(socket: OwnedFd) -> io::Result<Listener> {
        // SAFETY: an OwnedFd is open, stays the same, and is owned by the AsyncFd until that is dropped.
        Ok(Listener(unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE)? }))
    }

    /// Wait for the host's next connection.
    pub async fn accept(&self) -> io::Result<UnixStream> {
        loop {
            let mut guard = self.0.readable().await?;
            match accept(guard.get_inner()) {
                Ok((socket, libc::VMADDR_CID_HOST)) => {
                    // The runtime asks nothing of it that is not the same for every stream.
                    return UnixStream::from_std(std::os::unix::net::UnixStream::from(socket));
                }
                Ok(_) | Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => guard.clear_ready(),
                Err(_) => sleep(PAUSE).await,
            }
        }
    }
}

/// A connection and the number of who made it.
fn accept(listener: &OwnedFd) -> Result<(OwnedFd, u32), Errno> {
    // SAFETY: zeros are a valid address.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    let mut size = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the kernel writes an address of at most that size, and its size.
    let socket =
        unsafe { libc::accept4(listener.as_raw_fd(), (&raw mut address).cast(), &raw mut size, flags) };
    if socket < 0 {
        return Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    // SAFETY: the kernel has just given it, and nobody else has it.
    Ok((unsafe { OwnedFd::from_raw_fd(socket) }, address.svm_cid))
}
