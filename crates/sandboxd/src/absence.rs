//! The time between being told that a checkpoint is taken and being told to listen again. A checkpoint may be resumed
//! days later, on a clock that went on: that counts for no command's deadline, nor for how long it ran.

use std::cell::Cell;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

#[derive(Default)]
pub struct Absence {
    since: Cell<Option<Instant>>,
    before: Cell<Duration>,
    over: Notify,
}

impl Absence {
    pub fn begin(&self, now: Instant) {
        self.since.set(self.since.get().or(Some(now)));
    }

    pub fn end(&self, now: Instant) {
        self.before.set(self.total(now));
        self.since.set(None);
        self.over.notify_waiters();
    }

    pub fn is_on(&self) -> bool {
        self.since.get().is_some()
    }

    /// All of it until now.
    pub fn total(&self, now: Instant) -> Duration {
        self.before.get() + self.since.get().map_or(Duration::ZERO, |since| now - since)
    }

    /// Wait for the end of the one that is on.
    pub async fn over(&self) {
        self.over.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_counts_what_is_between_begin_and_end() {
        let (absence, start) = (Absence::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!((absence.is_on(), absence.total(at(5))), (false, Duration::ZERO));
        absence.begin(at(5));
        absence.begin(at(8));
        assert_eq!((absence.is_on(), absence.total(at(12))), (true, Duration::from_secs(7)));
        absence.end(at(12));
        absence.begin(at(20));
        absence.end(at(21));
        assert_eq!((absence.is_on(), absence.total(at(100))), (false, Duration::from_secs(8)));
    }
}
