use super::{Client, Done, Host, Records, Row, serve};
use crate::error::{Error, Result};
use crate::format::Id;
use crate::read::{Locate, Location};
use std::sync::atomic::Ordering;
use std::thread::ThreadId;

#[derive(Default)]
struct Caller {
    calls: Vec<(&'static str, usize)>,
    threads: Vec<ThreadId>,
    /// The call that fails.
    fails: &'static str,
}

impl Caller {
    fn called(&mut self, name: &'static str, count: usize) -> Result<()> {
        self.calls.push((name, count));
        self.threads.push(std::thread::current().id());
        if self.fails == name { Err(Error::Conflict(name.to_owned())) } else { Ok(()) }
    }
}

impl Host for Caller {
    fn locate(&mut self, ids: &[Id]) -> Result<Vec<Option<Location>>> {
        self.called("locate", ids.len())?;
        Ok(ids.iter().map(|id| Some(Location { pack: u64::from(id[0]), offset: 0, length: 0 })).collect())
    }

    fn has(&mut self, ids: &[Id]) -> Result<Vec<bool>> {
        self.called("has", ids.len())?;
        Ok(ids.iter().map(|id| id[0] % 2 == 0).collect())
    }

    fn append(&mut self, records: &Records) -> Result<()> {
        self.called("append", records.rows.len())
    }

    fn pulse(&mut self, _done: &Done) -> Result<()> {
        self.called("pulse", 0)
    }
}

fn id(byte: u8) -> Id {
    [byte; 32]
}

fn records() -> Records {
    Records { bytes: vec![1, 2], rows: vec![Row { id: id(1), offset: 0, length: 2, base: None, depth: 0 }] }
}

#[test]
fn workers_are_answered_on_the_calling_thread() {
    let mut caller = Caller::default();
    let answers = serve(&mut caller, |client| {
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..4u8)
                .map(|number| {
                    let client = client.clone();
                    scope.spawn(move || {
                        let held = client.ask(vec![id(number), id(number + 1)]).unwrap().recv().unwrap();
                        let places = client.locate(&[id(number)]).unwrap();
                        client.append(records()).unwrap();
                        (held, places[0].unwrap().pack)
                    })
                })
                .collect();
            Ok(workers.into_iter().map(|worker| worker.join().unwrap()).collect::<Vec<_>>())
        })
    });
    let want: Vec<_> = (0..4u8).map(|n| (vec![n % 2 == 0, n % 2 == 1], u64::from(n))).collect();
    assert_eq!(answers.unwrap(), want);
    let asked: usize = caller.calls.iter().filter(|call| call.0 == "has").map(|call| call.1).sum();
    assert_eq!(asked, 8);
    assert_eq!(caller.calls.iter().filter(|call| call.0 == "append").count(), 4);
    assert_eq!(caller.calls.last().unwrap().0, "pulse", "the end is told");
    assert!(caller.threads.iter().all(|thread| *thread == std::thread::current().id()));
}

#[test]
fn questions_that_wait_are_asked_at_once() {
    let mut caller = Caller::default();
    serve(&mut caller, |client| {
        // While the caller appends it answers nothing.
        let answers: Vec<_> = (0..10).map(|_| client.ask(vec![id(2); 3]).unwrap()).collect();
        assert!(answers.into_iter().all(|answer| answer.recv().unwrap() == [true; 3]));
        Ok(())
    })
    .unwrap();
    let asked: Vec<usize> = caller.calls.iter().filter(|call| call.0 == "has").map(|call| call.1).collect();
    assert_eq!(asked.iter().sum::<usize>(), 30);
}

/// Do one thing for ever.
fn keep_on(client: &Client, what: &str) -> Error {
    loop {
        let done = match what {
            "has" => {
                client.ask(vec![id(1)]).and_then(|answer| answer.recv().map_err(|_| Error::Stopped)).map(drop)
            }
            "locate" => client.locate(&[id(1)]).map(drop),
            "append" => client.append(records()),
            _ => client.check(),
        };
        if let Err(error) = done {
            return error;
        }
    }
}

#[test]
fn an_error_of_the_caller_ends_all_work() {
    for fails in ["has", "locate", "append", "pulse"] {
        let mut caller = Caller { fails, ..Caller::default() };
        let error = serve(&mut caller, |client| {
            std::thread::scope(|scope| {
                for what in ["has", "locate", "append", "check"] {
                    let client = client.clone();
                    scope.spawn(move || assert!(matches!(keep_on(&client, what), Error::Stopped)));
                }
            });
            Err::<(), _>(Error::Stopped)
        });
        assert!(matches!(error, Err(Error::Conflict(what)) if what == fails));
    }
}

#[test]
fn an_error_of_the_work_is_handed_on() {
    let error = serve(&mut Caller::default(), |_| Err::<(), _>(Error::Damaged("it".to_owned())));
    assert!(matches!(error, Err(Error::Damaged(what)) if what == "it"));
}

#[test]
fn a_panic_becomes_an_error() {
    let error = serve(&mut Caller::default(), |client| -> Result<()> {
        client.done.files.fetch_add(1, Ordering::Relaxed);
        panic!("what {}", 1)
    });
    assert!(matches!(error, Err(Error::Internal(what)) if what == "what 1"));
}

#[test]
fn buffers_come_back() {
    serve(&mut Caller::default(), |client| {
        assert_eq!(client.buffer().capacity(), 0);
        client.append(records()).unwrap();
        let mut buffer = Vec::new();
        while buffer.capacity() == 0 {
            buffer = client.buffer();
        }
        assert!(buffer.is_empty());
        Ok(())
    })
    .unwrap();
}
