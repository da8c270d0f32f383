//! The daemon's standing supervisors that have no command at the moment (`standing.rs`).
//!
//! There is always another way to start a command, so whichever of them looks wrong is given up: one that has ended,
//! that was stopped, or that takes no message.

use super::start::watch;
use crate::supervisor::{REPORT_BYTES, Report};
use rustix::net::RecvFlags;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// How many may wait. One serves whoever runs a command after the other; each is a process of the sandbox's, and
/// counts as one.
const MOST: usize = 2;

struct Idle {
    control: Rc<AsyncFd<OwnedFd>>,
    /// `None` until it has said so.
    pid: Option<Pid>,
}

#[derive(Default)]
pub struct Pool(RefCell<Vec<Idle>>);

impl Pool {
    /// Know a new supervisor, where there is one, by the daemon's end of its socket. It has yet to say that it is
    /// there.
    pub fn expect(&self, control: Option<OwnedFd>) {
        if let Some(Ok(control)) = control.map(|control| watch(control, Interest::READABLE)) {
            self.0.borrow_mut().push(Idle { control: Rc::new(control), pid: None });
        }
    }

    /// Take one that is well, and its process id.
    pub fn take(&self) -> Option<(Rc<AsyncFd<OwnedFd>>, Pid)> {
        self.look();
        loop {
            let mut idle = self.0.borrow_mut();
            let index = idle.iter().rposition(|idle| idle.pid.is_some())?;
            let Idle { control, pid } = idle.remove(index);
            if let Some(pid) = pid.filter(|&pid| is_well(pid)) {
                return Some((control, pid));
            }
        }
    }

    /// Take one back whose tree is gone. One too many ends as its socket does.
    pub fn give(&self, control: Rc<AsyncFd<OwnedFd>>, pid: i32) {
        self.look();
        let mut idle = self.0.borrow_mut();
        if idle.len() < MOST {
            idle.push(Idle { control, pid: Pid::from_raw(pid) });
        }
    }

    /// A child of the daemon has ended.
    pub fn forget(&self, pid: Pid) {
        self.0.borrow_mut().retain(|idle| idle.pid != Some(pid));
    }

    pub fn has(&self, pid: Pid) -> bool {
        self.look();
        self.0.borrow().iter().any(|idle| idle.pid == Some(pid))
    }

    /// None is there, and none is about to be.
    pub fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    /// Hear of new ones that are there, or will never be.
    fn look(&self) {
        self.0.borrow_mut().retain_mut(|idle| {
            if idle.pid.is_none() {
                let mut bytes = [0; REPORT_BYTES];
                match rustix::net::recv(idle.control.get_ref(), &mut bytes, RecvFlags::empty()) {
                    Ok((REPORT_BYTES, _)) => match Report::decode(&bytes) {
                        Some(Report::Idle { pid }) => idle.pid = Pid::from_raw(pid),
                        _ => return false,
                    },
                    Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                    Ok(_) | Err(_) => return false,
                }
            }
            true
        });
    }
}

/// Whether a child lives and is not stopped. A stopped one is ended: nobody is going to wake it.
fn is_well(pid: Pid) -> bool {
    let options =
        WaitIdOptions::EXITED | WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    match waitid(WaitId::Pid(pid), options) {
        Ok(None) => true,
        Ok(Some(status)) => {
            if status.stopped() {
                let _ = kill_process(pid, Signal::KILL);
            }
            false
        }
        Err(_) => false,
    }
}
