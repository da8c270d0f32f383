//! What a command's end looks like to the client.

use super::object::End;
use crate::errors::{Code, Failure, words};
use crate::pack::MapWriter;
use crate::supervisor::Stage;
use rustix::io::Errno;
use std::time::Duration;

/// The end of the command's own process.
pub struct Exit {
    pub status: i32,
    pub user_us: u64,
    pub system_us: u64,
    pub max_rss_kb: u64,
    pub wall: Duration,
    /// Whether the kernel killed it for want of memory, where that is known.
    pub oom_killed: Option<bool>,
}

impl Exit {
    /// It died of SIGKILL, or says that what it waited for did, as a shell does.
    pub fn was_killed(&self) -> bool {
        if libc::WIFSIGNALED(self.status) {
            libc::WTERMSIG(self.status) == libc::SIGKILL
        } else {
            libc::WEXITSTATUS(self.status) == 128 + libc::SIGKILL
        }
    }
}

/// Everything that is known at the end.
pub struct Facts<'a> {
    pub program: &'a str,
    pub failed: Option<(Stage, i32)>,
    pub exit: Option<&'a Exit>,
    /// Its tree was to be ended.
    pub killed: bool,
    /// Some of the tree could not be ended in time.
    pub stuck: bool,
    pub timed_out: bool,
    pub elapsed: Duration,
}

impl Facts<'_> {
    pub fn end(&self) -> End {
        self.exit_map().map_or_else(End::Error, End::Exit)
    }

    fn exit_map(&self) -> Result<Vec<u8>, Failure> {
        if self.stuck {
            let text = "the processes of the command could not be ended in time";
            return Err(Failure::new(Code::Stuck, text));
        }
        let message = match self.failed {
            None => None,
            Some(failed) => Some(self.not_started(failed)?),
        };
        let lost = Exit {
            status: libc::SIGKILL,
            user_us: 0,
            system_us: 0,
            max_rss_kb: 0,
            wall: self.elapsed,
            oom_killed: None,
        };
        let exit = match self.exit {
            Some(exit) => exit,
            None if self.killed => &lost,
            None => return Err(Failure::new(Code::Internal, "the command's supervisor was killed")),
        };
        let signalled = libc::WIFSIGNALED(exit.status);
        let optional = u32::from(message.is_some()) + u32::from(exit.oom_killed.is_some());
        let map = MapWriter::new(6 + optional);
        let map = match &message {
            Some((code, text)) => map.uint("code", *code).str("message", text),
            None if signalled => map.uint("signal", libc::WTERMSIG(exit.status) as u64),
            None => map.uint("code", libc::WEXITSTATUS(exit.status) as u64),
        };
        let map = match exit.oom_killed {
            None => map,
            Some(oom_killed) => map.bool("oom_killed", oom_killed),
        };
        // A command that ended by itself while the deadline passed was in time.
        Ok(map
            .bool("timed_out", self.timed_out && signalled)
            .uint("user_us", exit.user_us)
            .uint("system_us", exit.system_us)
            .uint("max_rss_kb", exit.max_rss_kb)
            .uint("wall_us", exit.wall.as_micros() as u64)
            .done())
    }

    /// The code and the words of a program that cannot be executed, or the error of whoever should have done it.
    fn not_started(&self, (stage, errno): (Stage, i32)) -> Result<(u64, String), Failure> {
        let failure = |what: &str| {
            let code = Code::of(Errno::from_raw_os_error(errno));
            Failure::new(code, format!("{what}: {}", words(errno)))
        };
        match (stage, errno) {
            (Stage::Fork, _) => Err(failure("no process for the command")),
            (Stage::Setup, _) => Err(failure("the command could not be set up")),
            (Stage::Workdir, _) => {
                Err(Failure::new(Code::Workdir, format!("working directory: {}", words(errno))))
            }
            (Stage::Exec, libc::E2BIG) => {
                Err(Failure::invalid(format!("{}: {}", self.program, words(errno))))
            }
            (Stage::Exec, libc::EAGAIN | libc::ENOMEM | libc::EMFILE | libc::ENFILE) => {
                Err(failure(self.program))
            }
            (Stage::Exec, libc::ENOENT) if !self.program.contains('/') => {
                Ok((127, format!("{}: command not found", self.program)))
            }
            (Stage::Exec, libc::ENOENT) => Ok((127, format!("{}: {}", self.program, words(errno)))),
            (Stage::Exec, _) => Ok((126, format!("{}: {}", self.program, words(errno)))),
        }
    }
}
