//! The arguments of `exec.start`, checked once.

use super::tty::Size;
use crate::daemon::Daemon;
use crate::errors::Failure;
use crate::launch::Plan;
use crate::ops::Args;
use crate::pack::{Map, Value};
use std::time::Duration;

/// More strings than these the kernel never takes: their pointers alone fill its share of an 8 MiB stack.
const MAX_STRINGS: usize = 256 << 10;
/// Longer deadlines are as good as none, and times stay far from what a clock can add up.
const MAX_TIMEOUT_MS: u64 = 10 * 365 * 24 * 3600 * 1000;
const MAX_ID: usize = 64;
/// Kept with every status, so it is bounded like one.
const MAX_TAG: usize = 256;
/// What a listing shows of a command.
const MAX_SHOWN: usize = 4_096;

/// What makes a command an object that others can name.
pub struct Name {
    pub id: String,
    pub tag: Option<String>,
    /// The command line, cut for listings.
    pub argv: Vec<Vec<u8>>,
}

pub struct Request {
    pub plan: Plan,
    pub program: String,
    pub timeout: Duration,
    pub name: Option<Name>,
    pub stdin: bool,
    pub tty: Option<Size>,
    pub detach: bool,
}

impl Request {
    pub fn parse(args: &Args<'_>, daemon: &Daemon) -> Result<Request, Failure> {
        let argv = argv(args)?;
        let program = match argv.first() {
            Some(first) if !first.is_empty() => String::from_utf8_lossy(first).chars().take(200).collect(),
            _ => return Err(Failure::invalid("argv has no command")),
        };
        let env = env(args, MAX_STRINGS - argv.len())?;
        let timeout = args.uint("timeout_ms")?;
        if timeout == 0 {
            return Err(Failure::invalid("timeout_ms is 0"));
        }
        let tty = match args.optional("tty") {
            None => None,
            Some(Value::Map(map)) => {
                let map = Map::parse(map).map_err(|_| Failure::invalid("tty is not a map"))?;
                Some(Size::parse(&Args::new(map))?)
            }
            Some(_) => return Err(Failure::invalid("tty is not a map")),
        };
        let name = match args.optional("id") {
            None => None,
            Some(_) => Some(Name { id: id(args)?, tag: tag(args)?, argv: shown(&argv) }),
        };
        let detach = args.bool_or("detach", false)?;
        if detach && name.is_none() {
            return Err(Failure::invalid("detach without an id"));
        }
        let cwd = args.path("cwd")?;
        let user = (daemon.config.uid, daemon.config.gid);
        let plan = Plan::new(argv, env, &cwd, user, daemon.open_files, tty.is_some())
            .ok_or_else(|| Failure::invalid("a NUL in argv or env"))?;
        let timeout = Duration::from_millis(timeout.min(MAX_TIMEOUT_MS));
        Ok(Request { plan, program, timeout, name, stdin: args.bool_or("stdin", false)?, tty, detach })
    }

    /// Whether the stream that starts the command feeds it.
    pub fn takes_input(&self) -> bool {
        (self.stdin || self.tty.is_some()) && !self.detach
    }
}

fn argv(args: &Args<'_>) -> Result<Vec<Vec<u8>>, Failure> {
    let Value::Array(list) = args.get("argv")? else {
        return Err(Failure::invalid("argv is not an array"));
    };
    if list.len() > MAX_STRINGS {
        return Err(Failure::invalid("argv has too many elements"));
    }
    let element = |value| match value {
        Value::Bin(bytes) => Ok(bytes.to_vec()),
        _ => Err(Failure::invalid("argv has an element that is not bytes")),
    };
    list.iter().map(element).collect()
}

/// The environment as the kernel takes it.
fn env(args: &Args<'_>, most: usize) -> Result<Vec<Vec<u8>>, Failure> {
    let Value::Array(list) = args.get("env")? else {
        return Err(Failure::invalid("env is not an array"));
    };
    if list.len() > most {
        return Err(Failure::invalid("argv and env have too many elements"));
    }
    let mut env = Vec::with_capacity(list.len());
    for pair in list.iter() {
        let Value::Array(pair) = pair else {
            return Err(Failure::invalid("env has an element that is not a pair"));
        };
        let mut pair = pair.iter();
        let (Some(Value::Bin(key)), Some(Value::Bin(value)), None) = (pair.next(), pair.next(), pair.next())
        else {
            return Err(Failure::invalid("env has an element that is not a pair of bytes"));
        };
        if key.is_empty() || key.contains(&b'=') {
            return Err(Failure::invalid("env has a name that is empty or has a = in it"));
        }
        env.push([key, b"=", value].concat());
    }
    Ok(env)
}

/// The name of a command in any of its operations.
pub fn id(args: &Args<'_>) -> Result<String, Failure> {
    match args.get("id")? {
        Value::Str(id)
            if (1..=MAX_ID).contains(&id.len())
                && id.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-')) =>
        {
            Ok(id.to_string())
        }
        _ => Err(Failure::invalid("id is not 1 to 64 characters of a-z, 0-9 and -")),
    }
}

fn tag(args: &Args<'_>) -> Result<Option<String>, Failure> {
    match args.optional("tag") {
        None => Ok(None),
        Some(Value::Str(tag)) if tag.len() <= MAX_TAG => Ok(Some(tag.to_string())),
        Some(_) => Err(Failure::invalid(format!("tag is not text of at most {MAX_TAG} bytes"))),
    }
}

fn shown(argv: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut left = MAX_SHOWN;
    let mut shown = Vec::new();
    for argument in argv {
        // An empty argument costs too, else a listing could be made of nothing else.
        if left == 0 {
            break;
        }
        let kept = argument.len().min(left);
        shown.push(argument[..kept].to_vec());
        left -= kept.max(1);
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_cut() {
        assert_eq!(shown(&[b"a".to_vec(), b"".to_vec(), b"b".to_vec()]), [&b"a"[..], b"", b"b"]);
        let cut = shown(&[vec![1; 4_000], vec![2; 4_000], vec![3; 10]]);
        assert_eq!(cut.iter().map(Vec::len).collect::<Vec<_>>(), [4_000, 96]);
        assert_eq!(shown(&vec![Vec::new(); 10_000]).len(), MAX_SHOWN);
    }
}
