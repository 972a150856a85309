//! Copies in batches, between the host and a device.

use super::copy::{Copy, PageableCopies, Side, copy_async};
use super::{not_null, refuse, store};
use crate::fault;
use crate::fault_plan::Site;
use crate::injection::strike;
use crate::runtime::capture::forbid_unsafe;
use crate::runtime::context::{current, stream};
use crate::sanitizer::allocation_table::{self, MemoryLocation};
use crate::status::{CAPTURE_MODE, INTERNAL, NULL_PARAM, Outcome, PARAM_INVALID, acl, failure};
use ascend_sys::bindings::{
    aclError, aclrtMemLocation, aclrtMemLocationType, aclrtMemcpyBatchAttr, aclrtMemcpyKind, aclrtStream,
};
use std::ffi::c_void;

/// The arguments of a batch.
struct Batch {
    name: &'static str,
    dsts: *mut *mut c_void,
    dst_maxs: *mut usize,
    srcs: *mut *mut c_void,
    sizes: *mut usize,
    count: usize,
    attributes: *mut aclrtMemcpyBatchAttr,
    starts: *mut usize,
    attribute_count: usize,
    fail_index: *mut usize,
}

impl Batch {
    /// The attributes, each with the number of the first copy that it applies to.
    ///
    /// # Safety
    ///
    /// The arrays of attributes and of their starts have `attribute_count` elements.
    unsafe fn attributes(&self) -> Outcome<Vec<(usize, aclrtMemcpyBatchAttr)>> {
        let name = self.name;
        if !(1..=self.count).contains(&self.attribute_count) {
            return Err(refuse(
                &format!("{name}: numAttrs"),
                self.attribute_count,
                &format!("1 to numBatches, {}", self.count),
            ));
        }
        let mut attributes: Vec<(usize, aclrtMemcpyBatchAttr)> = Vec::new();
        for place in 0..self.attribute_count {
            // SAFETY: `place` is within both arrays, which have `attribute_count` elements.
            let (start, attribute) =
                unsafe { (self.starts.add(place).read_unaligned(), self.attributes.add(place).read_unaligned()) };
            let right = match attributes.last() {
                None => start == 0,
                Some((before, _)) => start > *before && start < self.count,
            };
            if !right {
                return Err(failure!(
                    NULL_PARAM,
                    "{name}: attrsIndexes[{place}]: given {start}, allowed: 0 first, then rising numbers below \
                     numBatches, {}",
                    self.count
                ));
            }
            if attribute.rsv != [0; 16] {
                return Err(failure!(NULL_PARAM, "{name}: attrs[{place}].rsv: allowed: zeros"));
            }
            attributes.push((start, attribute));
        }
        Ok(attributes)
    }

    /// Checks the arguments and builds the copies.
    ///
    /// # Safety
    ///
    /// Each pointer is null or valid for the number of elements that its count gives.
    unsafe fn copies(&self) -> Outcome<Vec<Copy>> {
        let name = self.name;
        not_null(&format!("{name}: failIndex"), self.fail_index)?;
        // SAFETY: not null, so valid for writing.
        unsafe { store("failIndex", self.fail_index, usize::MAX) }?;
        not_null(&format!("{name}: dsts"), self.dsts)?;
        not_null(&format!("{name}: destMaxs"), self.dst_maxs)?;
        not_null(&format!("{name}: srcs"), self.srcs)?;
        not_null(&format!("{name}: sizes"), self.sizes)?;
        not_null(&format!("{name}: attrs"), self.attributes)?;
        not_null(&format!("{name}: attrsIndexes"), self.starts)?;
        if self.count == 0 {
            return Err(refuse(&format!("{name}: numBatches"), 0, "1 or more"));
        }
        // SAFETY: the caller's promise.
        let attributes = unsafe { self.attributes() }?;
        let mut copies = Vec::new();
        let mut direction = None;
        for place in 0..self.count {
            let attribute = attributes.iter().rev().find(|(start, _)| *start <= place);
            let missing = || failure!(INTERNAL, "{name}: copy {place} has no attribute");
            let (_, attribute) = attribute.ok_or_else(missing)?;
            // SAFETY: within the arrays, which have `count` elements.
            let (dst, dst_max, src, size) = unsafe {
                (
                    self.dsts.add(place).read_unaligned(),
                    self.dst_maxs.add(place).read_unaligned(),
                    self.srcs.add(place).read_unaligned(),
                    self.sizes.add(place).read_unaligned(),
                )
            };
            let checked = kind(name, attribute).and_then(|kind| {
                let copy = Copy::new(name, dst, dst_max, src, size, kind)?;
                check_device(name, "dst", dst.addr(), copy.dst.side, attribute.dstLoc)?;
                check_device(name, "src", src.addr(), copy.src.side, attribute.srcLoc)?;
                if *direction.get_or_insert(kind) != kind {
                    return Err(failure!(
                        NULL_PARAM,
                        "{name}: some copies go to the device and some come from it, allowed: one direction"
                    ));
                }
                Ok(copy)
            });
            match checked {
                Ok(copy) => copies.push(copy),
                Err(mut failure) => {
                    // SAFETY: found not null above.
                    unsafe { store("failIndex", self.fail_index, place) }?;
                    failure.message = format!("copy {place}: {}", failure.message).into();
                    return Err(failure);
                }
            }
        }
        Ok(copies)
    }
}

/// The kind of copy that an attribute names.
fn kind(name: &str, attribute: &aclrtMemcpyBatchAttr) -> Outcome<aclrtMemcpyKind> {
    use aclrtMemLocationType as Type;
    let is_host = |location: Type| {
        [Type::ACL_MEM_LOCATION_TYPE_HOST, Type::ACL_MEM_LOCATION_TYPE_UNREGISTERED].contains(&location)
    };
    let device = Type::ACL_MEM_LOCATION_TYPE_DEVICE;
    let (to, from) = (attribute.dstLoc.type_, attribute.srcLoc.type_);
    if to == device && is_host(from) {
        Ok(aclrtMemcpyKind::ACL_MEMCPY_HOST_TO_DEVICE)
    } else if is_host(to) && from == device {
        Ok(aclrtMemcpyKind::ACL_MEMCPY_DEVICE_TO_HOST)
    } else {
        Err(failure!(
            NULL_PARAM,
            "{name}: attrs: given a copy from location type {} to {}, allowed: from the host (0) to a device (1), from \
             a device to the host",
            from.0,
            to.0
        ))
    }
}

/// Checks that device memory is on the device that an attribute names.
fn check_device(name: &str, what: &str, address: usize, side: Side, location: aclrtMemLocation) -> Outcome {
    let found = allocation_table::lookup(address).map(|allocation| allocation.location);
    match found {
        Some(MemoryLocation::Device(device)) if side == Side::Device && u32::try_from(device) != Ok(location.id) => {
            Err(failure!(
                PARAM_INVALID,
                "{name}: {what} at {address:#x} is on device {device}, but its location names device {}",
                location.id
            ))
        }
        _ => Ok(()),
    }
}

pub unsafe extern "C" fn aclrtMemcpyBatch(
    dsts: *mut *mut c_void,
    destMaxs: *mut usize,
    srcs: *mut *mut c_void,
    sizes: *mut usize,
    numBatches: usize,
    attrs: *mut aclrtMemcpyBatchAttr,
    attrsIndexes: *mut usize,
    numAttrs: usize,
    failIndex: *mut usize,
) -> aclError {
    const NAME: &str = "aclrtMemcpyBatch";
    acl(|| {
        current()?;
        let batch = Batch {
            name: NAME,
            dsts,
            dst_maxs: destMaxs,
            srcs,
            sizes,
            count: numBatches,
            attributes: attrs,
            starts: attrsIndexes,
            attribute_count: numAttrs,
            fail_index: failIndex,
        };
        // SAFETY: the caller's promise.
        let copies = unsafe { batch.copies() }?;
        forbid_unsafe(CAPTURE_MODE, NAME)?;
        strike(Site::Memcpy)?;
        fault::check_thread_device(NAME)?;
        for copy in &copies {
            // SAFETY: host memory is valid, by the caller's promise.
            unsafe { copy.run(NAME) }?;
        }
        Ok(())
    })
}

pub unsafe extern "C" fn aclrtMemcpyBatchAsync(
    dsts: *mut *mut c_void,
    destMaxs: *mut usize,
    srcs: *mut *mut c_void,
    sizes: *mut usize,
    numBatches: usize,
    attrs: *mut aclrtMemcpyBatchAttr,
    attrsIndexes: *mut usize,
    numAttrs: usize,
    failIndex: *mut usize,
    stream: aclrtStream,
) -> aclError {
    const NAME: &str = "aclrtMemcpyBatchAsync";
    acl(|| {
        self::stream(NAME, stream)?;
        let batch = Batch {
            name: NAME,
            dsts,
            dst_maxs: destMaxs,
            srcs,
            sizes,
            count: numBatches,
            attributes: attrs,
            starts: attrsIndexes,
            attribute_count: numAttrs,
            fail_index: failIndex,
        };
        // SAFETY: the caller's promise.
        let copies = unsafe { batch.copies() }?;
        // SAFETY: the caller's promise.
        unsafe { copy_async(NAME, &copies, stream, PageableCopies::Allowed) }
    })
}
