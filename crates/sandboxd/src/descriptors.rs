//! Closing what a forked process has taken along, by system calls alone.

use libc::{c_int, c_ulong};

/// Of a directory's entries, read at a time: some sixty.
const LISTED_BYTES: usize = 2_048;
/// Where an entry says how long it is, and where its name begins (getdents64(2)).
const LENGTH_AT: usize = 16;
const NAME_AT: usize = 19;

/// Close this process's descriptors from a number on.
///
/// Not every kernel has `close_range` (gVisor's of 2024 does not). Closing each number there may be is 20,000 calls where that is
/// the limit, which took longer than all else that a command's start needs, so that is the last resort.
///
/// # Safety
/// Nothing in this process uses the descriptors that are closed.
pub unsafe fn close_from(first: c_int) {
    // SAFETY: as for this function; the kernel fills the structure.
    unsafe {
        if libc::syscall(libc::SYS_close_range, first as c_ulong, c_ulong::from(u32::MAX), 0 as c_ulong) == 0
            || close_listed(first)
        {
            return;
        }
        let mut limit: libc::rlimit = std::mem::zeroed();
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        let end = c_int::try_from(limit.rlim_cur).unwrap_or(1 << 20).min(1 << 20);
        for fd in first..end {
            libc::close(fd);
        }
    }
}

/// Close the descriptors from a number on that /proc shows, and answer whether it shows them.
///
/// # Safety
/// As for [`close_from`].
unsafe fn close_listed(first: c_int) -> bool {
    // SAFETY: as for this function; the kernel fills at most as many bytes as it is told.
    unsafe {
        let list =
            libc::open(c"/proc/self/fd".as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC);
        if list < 0 {
            return false;
        }
        // Closing while reading may move entries that were not read yet, so it is read until nothing is left.
        let shown = loop {
            let mut closed = false;
            libc::lseek(list, 0, libc::SEEK_SET);
            let read = loop {
                let mut room = [0u64; LISTED_BYTES / 8];
                let length = libc::syscall(libc::SYS_getdents64, list, room.as_mut_ptr(), LISTED_BYTES);
                let Ok(length @ 1..=LISTED_BYTES) = usize::try_from(length) else { break length == 0 };
                let mut entries = std::slice::from_raw_parts(room.as_ptr().cast::<u8>(), length);
                while let Some((fd, rest)) = next(entries) {
                    entries = rest;
                    closed |= fd.is_some_and(|fd| fd >= first && fd != list && libc::close(fd) == 0);
                }
            };
            if !read || !closed {
                break read;
            }
        };
        libc::close(list);
        shown
    }
}

/// The number that the first of a directory's entries has for a name, where it has one, and the entries behind it.
fn next(entries: &[u8]) -> Option<(Option<c_int>, &[u8])> {
    let length = u16::from_ne_bytes(entries.get(LENGTH_AT..LENGTH_AT + 2)?.try_into().ok()?);
    let name = entries.get(NAME_AT..usize::from(length))?;
    let mut fd = None;
    for digit in name.iter().take_while(|&&byte| byte != 0) {
        if !digit.is_ascii_digit() {
            fd = None;
            break;
        }
        fd = Some(fd.unwrap_or(0i32).checked_mul(10)?.checked_add(i32::from(digit - b'0'))?);
    }
    Some((fd, entries.get(usize::from(length)..)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    /// Whether all of these are closed by `close`, and none below them, in a process of its own.
    fn closes(close: impl Fn() -> bool) -> bool {
        let child = move || -> Infallible {
            // SAFETY: system calls on the child's own descriptors.
            unsafe {
                let open = (10..400).step_by(3);
                let opened = open.clone().all(|fd| libc::dup2(2, fd) == fd);
                let done = close();
                let left = (10..1_000).any(|fd| libc::fcntl(fd, libc::F_GETFD) >= 0);
                let kept = libc::fcntl(2, libc::F_GETFD) >= 0;
                libc::_exit(c_int::from(!(opened && done && !left && kept)));
            }
        };
        let pid = crate::supervisor::fork_with(child).expect("a child");
        let mut status = 0;
        // SAFETY: the kernel fills the number.
        unsafe { libc::waitpid(pid, &raw mut status, 0) };
        status == 0
    }

    #[test]
    fn all_from_a_number_on_are_closed_with_and_without_the_call() {
        // SAFETY: the child uses none of them.
        assert!(closes(|| unsafe { close_listed(10) }));
        assert!(closes(|| {
            // SAFETY: as before.
            unsafe { close_from(10) };
            true
        }));
        assert!(!closes(|| true));
    }

    #[test]
    fn an_entry_is_a_number_or_none_and_a_broken_one_ends_the_list() {
        let entry = |name: &[u8]| {
            let mut bytes = vec![0; NAME_AT];
            bytes.extend(name);
            bytes.resize(NAME_AT + name.len() + 1, 0);
            bytes[LENGTH_AT] = bytes.len() as u8;
            bytes
        };
        for (name, fd) in
            [(&b"."[..], None), (b"..", None), (b"7", Some(7)), (b"1023", Some(1023)), (b"1x", None)]
        {
            let bytes = [entry(name), entry(b"9")].concat();
            let (found, rest) = next(&bytes).expect("an entry");
            assert_eq!((found, next(rest)), (fd, Some((Some(9), &[][..]))));
        }
        assert_eq!(next(&[]), None);
        assert_eq!(next(&entry(b"99999999999")), None);
        assert_eq!(next(&entry(b"12")[..20]), None);
    }
}
