//! Functions of `libc_sec.so` that programs written for CANN call: copies that know the capacity of their
//! destination.
//!
//! Those that print (`sprintf_s` and others) take a variable number of arguments, which no function in Rust can.

use std::ffi::{c_char, c_int, c_void};

/// The library's own status codes: what `errno` calls them, and with the highest bit where the destination was emptied.
const EOK: c_int = 0;
const EINVAL: c_int = 22;
const ERANGE: c_int = 34;
const RESET: c_int = 0x80;
const EOVERLAP_AND_RESET: c_int = 54 | RESET;

/// Largest capacity that a call may state.
const MOST: usize = 0x7fff_ffff;

fn overlap(to: *const c_void, from: *const c_void, count: usize) -> bool {
    to != from && to.addr().abs_diff(from.addr()) < count
}

/// Copies `count` bytes to a destination of `capacity` bytes; empties it if they do not fit or overlap.
///
/// # Safety
///
/// `to` is null or may be written for `capacity` bytes; `from` is null or may be read for `count`.
// SAFETY: the name is that of the C function, which nothing else in this library defines.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memcpy_s(to: *mut c_void, capacity: usize, from: *const c_void, count: usize) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { copy(to, capacity, from, count, overlap(to, from, count)) }
}

/// [`memcpy_s`] of bytes that may overlap.
///
/// # Safety
///
/// As for [`memcpy_s`].
// SAFETY: the name is that of the C function, which nothing else in this library defines.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memmove_s(to: *mut c_void, capacity: usize, from: *const c_void, count: usize) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { copy(to, capacity, from, count, false) }
}

/// # Safety
///
/// As for [`memcpy_s`].
unsafe fn copy(to: *mut c_void, capacity: usize, from: *const c_void, count: usize, overlaps: bool) -> c_int {
    let refused = match () {
        () if capacity == 0 || capacity > MOST => return ERANGE,
        () if to.is_null() => return EINVAL,
        () if from.is_null() => EINVAL | RESET,
        () if count > capacity => ERANGE | RESET,
        () if overlaps => EOVERLAP_AND_RESET,
        () => {
            // SAFETY: `count` bytes may be read, and written, since they fit.
            unsafe { to.cast::<u8>().copy_from(from.cast(), count) };
            return EOK;
        }
    };
    // SAFETY: `capacity` bytes may be written.
    unsafe { to.cast::<u8>().write_bytes(0, capacity) };
    refused
}

/// Fills `count` bytes of a destination of `capacity` bytes, or all of these if there are fewer.
///
/// # Safety
///
/// `to` is null or may be written for `capacity` bytes.
// SAFETY: the name is that of the C function, which nothing else in this library defines.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memset_s(to: *mut c_void, capacity: usize, byte: c_int, count: usize) -> c_int {
    if capacity == 0 || capacity > MOST {
        return ERANGE;
    }
    if to.is_null() {
        return EINVAL;
    }
    // SAFETY: no more than `capacity` bytes.
    unsafe { to.cast::<u8>().write_bytes(byte as u8, count.min(capacity)) };
    if count > capacity { ERANGE | RESET } else { EOK }
}

/// Copies a text to a destination of `capacity` bytes; empties it if it does not fit with its end, or overlaps.
///
/// # Safety
///
/// As for [`memcpy_s`], with a text that ends within the bytes that may be read.
// SAFETY: the name is that of the C function, which nothing else in this library defines.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strcpy_s(to: *mut c_char, capacity: usize, from: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { append(to, capacity, from, usize::MAX, false) }
}

/// [`strcpy_s`] of at most `count` bytes of the text.
///
/// # Safety
///
/// As for [`strcpy_s`]; the text need not end where `count` bytes may be read.
// SAFETY: the name is that of the C function, which nothing else in this library defines.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strncpy_s(to: *mut c_char, capacity: usize, from: *const c_char, count: usize) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { append(to, capacity, from, count, false) }
}

/// [`strcpy_s`] behind the text that is there.
///
/// # Safety
///
/// As for [`strcpy_s`]; the destination may be read.
// SAFETY: the name is that of the C function, which nothing else in this library defines.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strcat_s(to: *mut c_char, capacity: usize, from: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { append(to, capacity, from, usize::MAX, true) }
}

/// # Safety
///
/// As for [`strncpy_s`]; the destination may be read if its text is kept.
unsafe fn append(to: *mut c_char, capacity: usize, from: *const c_char, count: usize, keeps: bool) -> c_int {
    if capacity == 0 || capacity > MOST {
        return ERANGE;
    }
    if to.is_null() {
        return EINVAL;
    }
    // SAFETY: the caller's promises: `capacity` bytes of the destination; the text up to its end, or up to `count`.
    let length = |text: *const c_char, most: usize| unsafe { (0..most).take_while(|&i| *text.add(i) != 0).count() };
    let kept = if keeps { length(to, capacity) } else { 0 };
    let refused = if from.is_null() || kept == capacity {
        EINVAL | RESET
    } else {
        let more = length(from, count.min(capacity - kept));
        // What is written, with the end, against what is read.
        let (first, last) = (to.addr() + kept, to.addr() + kept + more);
        let overlaps = from.addr() <= last && first <= from.addr() + more;
        if kept + more >= capacity {
            ERANGE | RESET
        } else if overlaps && (keeps || !to.cast_const().eq(&from)) {
            EOVERLAP_AND_RESET
        } else {
            // SAFETY: the text and its end fit, and the two are apart or the same.
            unsafe {
                to.add(kept).copy_from(from, more);
                *to.add(kept + more) = 0;
            }
            return EOK;
        }
    };
    // SAFETY: the destination has a byte.
    unsafe { *to = 0 };
    refused
}
