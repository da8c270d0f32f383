//! What a machine is told about itself, on its config drive: a length of four bytes, big-endian, and one MessagePack map.
//!
//! The drive is a file of the host's that is another one, or has other bytes, once the machine was restored from a
//! checkpoint; so it is read anew at each beginning of a connection, past the page cache (`O_DIRECT`), which still holds
//! what was there before. The map without a key is a template's.

use crate::config::Config;
use crate::pack::Map;
use std::os::fd::OwnedFd;

pub const DRIVE: usize = 8_192;
const MAX_HOSTNAME: usize = 64;

pub struct Identity {
    /// Another one means another machine: restored, or a fork.
    pub instance: [u8; 16],
    pub keyed: bool,
    /// All zeros stand for a key that is not there.
    pub config: Config,
    pub memory_bytes: Option<u64>,
    pub hostname: String,
    pub machine_id: String,
    pub entropy: [u8; 64],
    pub tmp_bytes: u64,
    /// The workspace is mounted over what is on the drive of layers.
    pub layered: bool,
}

/// `O_DIRECT` takes memory that is aligned as the drive's blocks are.
#[repr(align(4096))]
struct Block([u8; DRIVE]);

impl Identity {
    /// Read the drive, which was opened with `O_DIRECT`. The words of an error go to the console.
    pub fn read(drive: &OwnedFd) -> Result<Identity, String> {
        let mut block = Box::new(Block([0; DRIVE]));
        let count = rustix::io::pread(drive, &mut block.0[..], 0)
            .map_err(|errno| format!("cannot read the config drive: {errno}"))?;
        Identity::parse(&block.0[..count]).ok_or("the config drive is malformed".to_string())
    }

    fn parse(bytes: &[u8]) -> Option<Identity> {
        let (length, rest) = bytes.split_first_chunk::<4>()?;
        let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
        let map = Map::parse(rest.get(..length)?).ok()?;
        let keyed = map.get("key").is_some();
        let key = if keyed { map.bin("key")?.try_into().ok()? } else { [0; 32] };
        let hostname = map.str("hostname")?;
        let machine_id = map.str("machine_id")?;
        let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
        if hostname.is_empty() || hostname.len() > MAX_HOSTNAME || !hostname.bytes().all(word) {
            return None;
        }
        if machine_id.len() != 32 || !machine_id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        {
            return None;
        }
        Some(Identity {
            instance: map.bin("instance")?.try_into().ok()?,
            keyed,
            config: Config::of(&map, key)?,
            memory_bytes: map.uint("memory_bytes"),
            hostname: hostname.to_string(),
            machine_id: machine_id.to_string(),
            entropy: map.bin("entropy")?.try_into().ok()?,
            tmp_bytes: map.uint("tmp_bytes")?,
            layered: map.uint("layered").is_some_and(|layered| layered != 0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pack::MapWriter;

    fn map(key: Option<&[u8]>, hostname: &str, machine_id: &str, entropy: &[u8]) -> Vec<u8> {
        let mut map = MapWriter::new(if key.is_some() { 10 } else { 9 })
            .uint("uid", 1000)
            .uint("gid", 1000)
            .uint("memory_bytes", 1 << 28)
            .uint("pids_limit", 256)
            .uint("tmp_bytes", 1 << 26)
            .bin("instance", &[3; 16])
            .str("hostname", hostname)
            .str("machine_id", machine_id)
            .bin("entropy", entropy);
        if let Some(key) = key {
            map = map.bin("key", key);
        }
        map.done()
    }

    fn drive(map: &[u8]) -> Vec<u8> {
        let mut bytes = (map.len() as u32).to_be_bytes().to_vec();
        bytes.extend(map);
        bytes.resize(DRIVE, 0);
        bytes
    }

    const ID: &str = "0123456789abcdef0123456789abcdef";

    #[test]
    fn a_drive_says_everything_and_a_templates_lacks_the_key_alone() {
        let identity =
            Identity::parse(&drive(&map(Some(&[7; 32]), "sandbox-1", ID, &[9; 64]))).expect("good");
        assert!(identity.keyed);
        assert_eq!((identity.config.key, identity.instance), ([7; 32], [3; 16]));
        assert_eq!((identity.config.uid, identity.config.pids_limit), (1000, Some(256)));
        assert_eq!((identity.memory_bytes, identity.tmp_bytes), (Some(1 << 28), 1 << 26));
        assert_eq!((&identity.hostname[..], &identity.machine_id[..]), ("sandbox-1", ID));
        assert_eq!(identity.entropy, [9; 64]);
        assert!(!identity.layered, "an older server's has no layers");
        let template = Identity::parse(&drive(&map(None, "template", ID, &[9; 64]))).expect("good");
        assert!(!template.keyed);
    }

    #[test]
    fn a_drive_is_whole_or_refused() {
        let good = map(Some(&[7; 32]), "sandbox", ID, &[9; 64]);
        for wrong in [
            map(Some(&[7; 31]), "sandbox", ID, &[9; 64]),
            map(Some(&[7; 32]), "", ID, &[9; 64]),
            map(Some(&[7; 32]), "two words", ID, &[9; 64]),
            map(Some(&[7; 32]), &"x".repeat(65), ID, &[9; 64]),
            map(Some(&[7; 32]), "sandbox", &ID[1..], &[9; 64]),
            map(Some(&[7; 32]), "sandbox", &ID.to_uppercase(), &[9; 64]),
            map(Some(&[7; 32]), "sandbox", ID, &[9; 63]),
            good[..good.len() - 1].to_vec(),
        ] {
            assert!(Identity::parse(&drive(&wrong)).is_none(), "{wrong:?}");
        }
        let mut longer = drive(&good);
        longer[..4].copy_from_slice(&(DRIVE as u32).to_be_bytes());
        assert!(Identity::parse(&longer).is_none());
        assert!(Identity::parse(&[0; DRIVE]).is_none());
        assert!(Identity::parse(b"\0\0").is_none());
    }
}
