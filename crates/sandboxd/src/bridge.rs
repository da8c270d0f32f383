//! `sandboxd bridge PATH`: a stream between standard input and output and the daemon's socket.
//!
//! An engine that shares no files with the server runs this in the sandbox, as root, and carries the streams. It copies
//! bytes and knows nothing of them: whoever is at the other end proves itself to the daemon. Either end's closing ends
//! it, since the wire has no half-closed state.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;

const PIECE: usize = 64 * 1024;

pub fn run(path: &Path) -> ExitCode {
    match carry(path) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sandboxd bridge: {}: {error}", path.display());
            ExitCode::FAILURE
        }
    }
}

fn carry(path: &Path) -> std::io::Result<()> {
    // Commands must not look into what passes here.
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?;
    let from_daemon = UnixStream::connect(path)?;
    let to_daemon = from_daemon.try_clone()?;
    let (input, output) = (descriptor(std::io::stdin())?, descriptor(std::io::stdout())?);
    let ended = std::sync::mpsc::channel();
    let other = ended.0.clone();
    std::thread::Builder::new().spawn(move || ended.0.send(copy(input, to_daemon)))?;
    std::thread::Builder::new().spawn(move || other.send(copy(from_daemon, output)))?;
    // The process ends with the first of the two; the other may wait for ever.
    ended.1.recv().unwrap_or(Ok(()))
}

/// Standard streams without the library's buffers, which would wait for ends of lines.
fn descriptor(stream: impl std::os::fd::AsFd) -> std::io::Result<File> {
    let own: OwnedFd = stream.as_fd().try_clone_to_owned()?;
    Ok(File::from(own))
}

fn copy(mut from: impl Read, mut to: impl Write) -> std::io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        match from.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(count) => to.write_all(&piece[..count])?,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_pass_until_the_end_and_nothing_is_held_back() {
        let (mut left, right) = UnixStream::pair().unwrap();
        let (mut seen, sink) = UnixStream::pair().unwrap();
        let copying = std::thread::spawn(move || copy(right, sink));
        left.write_all(b"no end of line").unwrap();
        let mut piece = [0; 14];
        seen.read_exact(&mut piece).unwrap();
        assert_eq!(&piece, b"no end of line");
        drop(left);
        copying.join().unwrap().unwrap();
        assert_eq!(seen.read(&mut piece).unwrap(), 0);
    }

    #[test]
    fn no_socket_is_an_error() {
        assert!(carry(Path::new("/nonexistent/sock")).is_err());
    }
}
