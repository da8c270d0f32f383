//! Workers over a stack of tasks.
//!
//! The last task that was pushed is done first, so that a tree is walked in depth and what waits stays small. The
//! first error ends all; what is left is dropped.

use crate::error::{Error, Result};
use crate::host::Client;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Tasks that a worker which takes several leaves.
const LEFT_FOR_OTHERS: usize = 16;

struct State<T> {
    tasks: Vec<T>,
    /// Tasks that are being done.
    active: usize,
    failed: Option<Error>,
}

pub struct Pool<T> {
    state: Mutex<State<T>>,
    wake: Condvar,
}

impl<T: Send> Pool<T> {
    pub fn new(first: Vec<T>) -> Pool<T> {
        Pool { state: Mutex::new(State { tasks: first, active: 0, failed: None }), wake: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Add tasks: the last one will be done next.
    pub fn push(&self, tasks: impl IntoIterator<Item = T>) {
        let mut state = self.lock();
        let before = state.tasks.len();
        state.tasks.extend(tasks);
        let added = state.tasks.len() - before;
        drop(state);
        match added {
            0 => {}
            1 => self.wake.notify_one(),
            _ => self.wake.notify_all(),
        }
    }

    /// Take the next task too, if it is `wanted` and enough are left for the others.
    pub fn take(&self, wanted: impl Fn(&T) -> bool) -> Option<T> {
        let mut state = self.lock();
        let enough = state.tasks.len() > LEFT_FOR_OTHERS;
        state.tasks.pop_if(|task| enough && wanted(task))
    }

    /// Do all tasks, and those that they push, on `threads` threads; returns when all have ended.
    pub fn run(
        self,
        threads: usize,
        client: &Client,
        work: impl Fn(&Self, T) -> Result<()> + Sync,
    ) -> Result<()> {
        let loops = || while self.step(client, &work) {};
        thread::scope(|scope| {
            // This thread works too. Where the system gives no more, fewer do it.
            for _ in 1..threads {
                if thread::Builder::new().spawn_scoped(scope, loops).is_err() {
                    break;
                }
            }
            loops();
        });
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        state.failed.map_or(Ok(()), Err)
    }

    fn fail(&self, error: Error) {
        let mut state = self.lock();
        // What came first is what went wrong: the others were stopped by it.
        state.failed.get_or_insert(error);
        state.tasks.clear();
        drop(state);
        self.wake.notify_all();
    }

    /// Do the next task; `false` when there is none and none can come.
    fn step(&self, client: &Client, work: &impl Fn(&Self, T) -> Result<()>) -> bool {
        let mut state = self.lock();
        let task = loop {
            if state.failed.is_some() {
                return false;
            }
            if let Some(task) = state.tasks.pop() {
                break task;
            }
            if state.active == 0 {
                return false;
            }
            state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        state.active += 1;
        drop(state);
        let done = catch_unwind(AssertUnwindSafe(|| client.check().and_then(|()| work(self, task))))
            .unwrap_or_else(|panic| Err(Error::panicked(panic.as_ref())));
        if let Err(error) = done {
            self.fail(error);
            // Others may be deep in a large file.
            client.stop();
        }
        self.lock().active -= 1;
        self.wake.notify_all();
        true
    }
}
