//! The private configuration: one MessagePack map from a descriptor or a file, and nothing from the
//! environment or the command line, which every process of the sandbox might see.

use crate::pack::Map;
use rustix::fs::{Mode, OFlags};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;

const MAX_CONFIG: usize = 4_096;

/// Where the daemon listens and where its configuration is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    Descriptor(RawFd),
    Path(PathBuf),
}

#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    Version,
    Probe { json: bool },
    Bridge { path: PathBuf },
    Serve { listen: Place, config: Place },
}

pub const USAGE: &str = "usage: sandboxd (--listen-fd N | --listen PATH) (--config-fd M | --config PATH)
       sandboxd bridge PATH
       sandboxd probe [--json]
       sandboxd --version";

/// Read the command line.
pub fn arguments(args: impl Iterator<Item = std::ffi::OsString>) -> Result<Command, String> {
    let (mut listen, mut config) = (None, None);
    let mut args = args.peekable();
    if args.next_if(|name| name == "probe").is_some() {
        let json = args.next_if(|name| name == "--json").is_some();
        return if args.next().is_none() {
            Ok(Command::Probe { json })
        } else {
            Err("probe takes --json and nothing else".to_string())
        };
    }
    if args.next_if(|name| name == "bridge").is_some() {
        return match (args.next(), args.next()) {
            (Some(path), None) => Ok(Command::Bridge { path: path.into() }),
            _ => Err("bridge takes the path of a socket and nothing else".to_string()),
        };
    }
    while let Some(name) = args.next() {
        let name = name.to_str().ok_or("an option that is not text")?.to_string();
        if name == "--version" {
            return Ok(Command::Version);
        }
        let value = args.next().ok_or(format!("{name} needs a value"))?;
        let place = if name.ends_with("-fd") {
            let number = value.to_str().and_then(|text| text.parse().ok()).filter(|&fd| fd > 2);
            Place::Descriptor(number.ok_or(format!("{name} needs a descriptor above 2"))?)
        } else {
            Place::Path(value.into())
        };
        match name.as_str() {
            "--listen-fd" | "--listen" => listen = Some(place),
            "--config-fd" | "--config" => config = Some(place),
            _ => return Err(format!("unknown option {name}")),
        }
    }
    match (listen, config) {
        (Some(listen), Some(config)) if listen != config => Ok(Command::Serve { listen, config }),
        _ => Err("a place to listen and another for the configuration are needed".to_string()),
    }
}

/// What the sandbox's creator says in private.
pub struct Config {
    pub key: [u8; 32],
    /// The sandbox user.
    pub uid: u32,
    pub gid: u32,
    /// The writable root. Always `/workspace` outside tests.
    pub workspace: Vec<u8>,
    /// Where the processes killed for want of memory are counted, in tests; elsewhere the sandbox's control group.
    pub memory_events: Option<Vec<u8>>,
    /// What an operation may keep in memory about a tree: a quarter of the sandbox's own memory where that is known.
    pub table_bytes: usize,
    /// How many processes and threads there may be, where the host leaves counting them to the sandbox's own kernel.
    pub pids_limit: Option<u64>,
}

/// [`Config::table_bytes`] at most.
const MAX_TABLES: u64 = 256 << 20;

impl Config {
    /// Read, check and close.
    pub fn load(place: Place) -> Result<Config, String> {
        let file = match place {
            // SAFETY: the caller of the process handed this descriptor in for us to own; start-up has made sure
            // that it is open, and nothing else in the process uses it.
            Place::Descriptor(fd) => unsafe { OwnedFd::from_raw_fd(fd) },
            Place::Path(path) => rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
                .map_err(|errno| format!("cannot open the configuration: {errno}"))?,
        };
        let mut bytes = [0u8; MAX_CONFIG + 1];
        let mut filled = 0;
        while filled < bytes.len() {
            match rustix::io::read(&file, &mut bytes[filled..]) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(format!("cannot read the configuration: {errno}")),
            }
        }
        if filled > MAX_CONFIG {
            return Err("the configuration is longer than 4096 bytes".to_string());
        }
        Config::parse(&bytes[..filled]).ok_or("the configuration is malformed".to_string())
    }

    fn parse(bytes: &[u8]) -> Option<Config> {
        let map = Map::parse(bytes).ok()?;
        Config::of(&map, map.bin("key")?.try_into().ok()?)
    }

    /// Everything but the key, which comes from elsewhere.
    pub fn of(map: &Map<'_>, key: [u8; 32]) -> Option<Config> {
        // The highest number means "leave as it is" to the kernel.
        let id = |key| map.uint(key).and_then(|id| u32::try_from(id).ok()).filter(|&id| id != u32::MAX);
        let workspace = match map.get("workspace") {
            None => b"/workspace".to_vec(),
            Some(_) => map.bin("workspace").filter(|path| path.first() == Some(&b'/'))?.to_vec(),
        };
        let memory_events = match map.get("memory_events") {
            None => None,
            Some(_) => Some(map.bin("memory_events").filter(|path| path.first() == Some(&b'/'))?.to_vec()),
        };
        let pids_limit = match map.get("pids_limit") {
            None => None,
            Some(_) => Some(map.uint("pids_limit")?),
        };
        let tables = map.uint("memory_bytes").map_or(MAX_TABLES, |memory| MAX_TABLES.min(memory / 4));
        Some(Config {
            key,
            uid: id("uid")?,
            gid: id("gid")?,
            workspace,
            memory_events,
            table_bytes: tables as usize,
            pids_limit,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pack::MapWriter;

    fn parse(text: &[&str]) -> Result<Command, String> {
        arguments(text.iter().map(Into::into))
    }

    #[test]
    fn both_forms_of_the_command_line() {
        let fds = Command::Serve { listen: Place::Descriptor(3), config: Place::Descriptor(4) };
        assert_eq!(parse(&["--listen-fd", "3", "--config-fd", "4"]), Ok(fds));
        let paths = Command::Serve { listen: Place::Path("/a".into()), config: Place::Path("/b".into()) };
        assert_eq!(parse(&["--config", "/b", "--listen", "/a"]), Ok(paths));
        assert_eq!(parse(&["--version"]), Ok(Command::Version));
        assert_eq!(parse(&["bridge", "/run/s"]), Ok(Command::Bridge { path: "/run/s".into() }));
        assert!(parse(&["bridge"]).is_err() && parse(&["bridge", "a", "b"]).is_err());
        assert_eq!(parse(&["probe", "--json"]), Ok(Command::Probe { json: true }));
        assert_eq!(parse(&["probe"]), Ok(Command::Probe { json: false }));
        assert!(parse(&["probe", "--json", "x"]).is_err());
        for wrong in [
            &[][..],
            &["--listen-fd", "3"],
            &["--listen-fd", "2", "--config-fd", "4"],
            &["--x", "y"],
            &["--listen"],
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
        assert!(parse(&["--listen-fd", "3", "--config-fd", "3"]).is_err());
    }

    #[test]
    fn a_configuration_is_whole_or_refused() {
        let key = [7; 32];
        let good = MapWriter::new(3).bin("key", &key).uint("uid", 1000).uint("gid", 1001).done();
        let config = Config::parse(&good).unwrap();
        assert_eq!((config.key, config.uid, config.gid), (key, 1000, 1001));
        assert_eq!(config.workspace, b"/workspace");
        assert_eq!(config.table_bytes, 256 << 20);
        let small =
            MapWriter::new(4).bin("key", &key).uint("uid", 1).uint("gid", 1).uint("memory_bytes", 64 << 20);
        let small = Config::parse(&small.done()).unwrap();
        assert_eq!((small.table_bytes, small.pids_limit), (16 << 20, None));
        let limited = MapWriter::new(4).bin("key", &key).uint("uid", 1).uint("gid", 1).uint("pids_limit", 64);
        assert_eq!(Config::parse(&limited.done()).unwrap().pids_limit, Some(64));
        for bad in [
            MapWriter::new(2).uint("uid", 1).uint("gid", 1).done(),
            MapWriter::new(3).bin("key", &key[1..]).uint("uid", 1).uint("gid", 1).done(),
            MapWriter::new(3).bin("key", &key).uint("uid", u64::from(u32::MAX)).uint("gid", 1).done(),
            MapWriter::new(4).bin("key", &key).uint("uid", 1).uint("gid", 1).str("pids_limit", "64").done(),
            b"".to_vec(),
        ] {
            assert!(Config::parse(&bad).is_none());
        }
    }
}
