//! Pseudo-terminals: made by the daemon, owned by the sandbox user.
//!
//! The other end is opened through the master itself where the kernel can (`TIOCGPTPEER`), so that no path can
//! lead elsewhere; gVisor and old kernels open it by its number. Both ends are closed on exec, and neither
//! becomes the daemon's controlling terminal.

use crate::errors::Failure;
use crate::ops::Args;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// The default end-of-file character.
const END_OF_FILE: u8 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    rows: u16,
    columns: u16,
}

impl Size {
    pub fn parse(args: &Args<'_>) -> Result<Size, Failure> {
        let number = |key: &str| match u16::try_from(args.uint(key)?) {
            Ok(n @ 1..) => Ok(n),
            _ => Err(Failure::invalid(format!("{key} is not from 1 to 65535"))),
        };
        Ok(Size { rows: number("rows")?, columns: number("cols")? })
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Set the size. The foreground processes get SIGWINCH when it is a new one.
pub fn resize(master: BorrowedFd<'_>, size: Size) -> Result<(), Errno> {
    let size = libc::winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the kernel reads one winsize.
    match unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) } {
        0 => Ok(()),
        _ => Err(last_error()),
    }
}

/// A master that does not block and the end for a command of this user.
pub fn open(size: Size, uid: u32, gid: u32) -> Result<(OwnedFd, OwnedFd), Failure> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let master = rustix::fs::open("/dev/ptmx", flags | OFlags::NONBLOCK, Mode::empty())?;
    let unlocked: libc::c_int = 0;
    // SAFETY: the kernel reads one int.
    if unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlocked) } != 0 {
        return Err(last_error().into());
    }
    let slave = other_end(&master, flags)?;
    rustix::fs::fchown(&slave, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
    rustix::fs::fchmod(&slave, Mode::from_raw_mode(0o620))?;
    resize(std::os::fd::AsFd::as_fd(&master), size)?;
    Ok((master, slave))
}

fn other_end(master: &OwnedFd, flags: OFlags) -> Result<OwnedFd, Failure> {
    // SAFETY: the request takes flags and gives a new descriptor, which nothing else owns.
    unsafe {
        let fd = libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags.bits());
        if fd >= 0 {
            return Ok(OwnedFd::from_raw_fd(fd));
        }
    }
    let mut number: libc::c_uint = 0;
    // SAFETY: the kernel writes one unsigned int.
    if unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTN, &raw mut number) } != 0 {
        return Err(last_error().into());
    }
    Ok(rustix::fs::open(format!("/dev/pts/{number}"), flags, Mode::empty())?)
}

/// The character that means the end of input on this terminal at the moment.
pub fn end_of_file(master: BorrowedFd<'_>) -> u8 {
    // SAFETY: zeros are a termios, which the call fills.
    unsafe {
        let mut settings: libc::termios = std::mem::zeroed();
        match libc::tcgetattr(master.as_raw_fd(), &raw mut settings) {
            0 => settings.c_cc[libc::VEOF],
            _ => END_OF_FILE,
        }
    }
}
