//! Threads that do file work as somebody else.
//!
//! They are all started before the daemon says that it is ready, since a sandbox whose processes are exhausted
//! has no thread to give later. Jobs are short: a slow peer holds none of the threads, because the asynchronous
//! side waits for credit or data between one job and the next.

use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use tokio::sync::oneshot;

type Job = Box<dyn FnOnce() + Send>;

const STACK: usize = 256 << 10;

#[derive(Default)]
struct Queue {
    jobs: Mutex<VecDeque<Job>>,
    more: Condvar,
}

impl Queue {
    fn next(&self) -> Job {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match jobs.pop_front() {
                Some(job) => return job,
                None => jobs = self.more.wait(jobs).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

/// A fixed number of threads and one queue.
#[derive(Clone)]
pub struct Workers {
    queue: Arc<Queue>,
}

impl Workers {
    /// Start `count` threads that run `prepare` first. An error of one is an error of all.
    pub fn start(
        name: &str,
        count: usize,
        prepare: impl Fn() -> io::Result<()> + Clone + Send + 'static,
    ) -> io::Result<Workers> {
        let queue = Arc::new(Queue::default());
        let (report, reports) = mpsc::channel();
        for _ in 0..count {
            let (queue, report, prepare) = (queue.clone(), report.clone(), prepare.clone());
            std::thread::Builder::new().name(name.to_string()).stack_size(STACK).spawn(move || {
                let prepared = prepare();
                let ready = prepared.is_ok();
                let _ = report.send(prepared);
                if ready {
                    loop {
                        queue.next()();
                    }
                }
            })?;
        }
        for _ in 0..count {
            reports.recv().map_err(io::Error::other)??;
        }
        Ok(Workers { queue })
    }

    /// Run a job whose result nobody waits for.
    pub fn post(&self, job: impl FnOnce() + Send + 'static) {
        self.queue.jobs.lock().unwrap_or_else(PoisonError::into_inner).push_back(Box::new(job));
        self.queue.more.notify_one();
    }

    /// Run a job, from now on, and wait for its result. The job runs to its end even when nobody waits any more.
    pub fn run<T: Send + 'static, F: FnOnce() -> T + Send + 'static>(
        &self,
        job: F,
    ) -> impl Future<Output = T> + use<T, F> {
        let (send, receive) = oneshot::channel();
        self.post(move || {
            let _ = send.send(job());
        });
        // The threads never end, and a panic ends the process.
        async { receive.await.expect("a worker answers every job") }
    }
}

/// Make this thread, and no other, the sandbox user. The real and the saved user stay root, so no process of
/// the sandbox user may signal or trace it; permission checks go by the effective one, and with it the
/// capabilities are off.
pub fn become_user(uid: u32, gid: u32) -> io::Result<()> {
    set_thread_groups(&[])?;
    set_thread_res_gid(None, Gid::from_raw(gid), None)?;
    set_thread_res_uid(None, Uid::from_raw(uid), None)?;
    Ok(())
}

/// Take back what [`become_user`] gave up.
pub fn become_root() -> io::Result<()> {
    set_thread_res_uid(None, Uid::ROOT, None)?;
    set_thread_res_gid(None, Gid::ROOT, None)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_the_workers_are_the_user() {
        let effective = |status: &str| {
            let line = status.lines().find(|line| line.starts_with("Uid:")).unwrap();
            line.split_whitespace().nth(2).unwrap().to_string()
        };
        let workers = Workers::start("test", 2, || become_user(1234, 1234)).unwrap();
        let seen = workers.run(|| std::fs::read_to_string("/proc/thread-self/status").unwrap()).await;
        assert_eq!(effective(&seen), "1234");
        assert!(seen.lines().any(|line| line == "CapEff:\t0000000000000000"));
        assert_eq!(effective(&std::fs::read_to_string("/proc/thread-self/status").unwrap()), "0");
    }

    #[tokio::test]
    async fn a_thread_can_go_there_and_back() {
        let workers = Workers::start("test", 1, || Ok(())).unwrap();
        let (there, back) = workers
            .run(|| {
                become_user(1234, 1234).unwrap();
                let there = rustix::process::geteuid().as_raw();
                become_root().unwrap();
                (there, rustix::process::geteuid().as_raw())
            })
            .await;
        assert_eq!((there, back), (1234, 0));
    }

    #[test]
    fn a_thread_that_cannot_prepare_is_an_error() {
        assert!(Workers::start("test", 2, || Err(io::Error::other("no"))).is_err());
    }
}
