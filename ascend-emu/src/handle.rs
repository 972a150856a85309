//! Opaque handles: numbers that are never used twice, made to look like pointers that cannot be followed.

use crate::lock::Lock;
use crate::named_enum::named_enum;
use crate::status::{
    ACLNN_INNER_NULLPTR, ACLNN_INVALID, ACLNN_NULLPTR, Failure, HCCL_PARA, HCCL_PTR, INVALID_HANDLE, NULL_PARAM,
    Outcome, failure,
};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

named_enum! {
    /// The type of object that a handle refers to. The number is the handle's top byte.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[repr(u8)]
    pub(crate) enum Kind {
        Context = 0xA1 => "context",
        Stream = 0xA2 => "stream",
        Event = 0xA3 => "event",
        Graph = 0xA4 => "graph",
        TaskGroup = 0xA5 => "task group",
        Physical = 0xA6 => "aclrtDrvMemHandle",
        Notify = 0xA7 => "notify",
        Communicator = 0xA8 => "communicator",
        Tensor = 0xB1 => "aclTensor",
        TensorList = 0xB2 => "aclTensorList",
        Scalar = 0xB3 => "aclScalar",
        ScalarList = 0xB4 => "aclScalarList",
        IntArray = 0xB5 => "aclIntArray",
        FloatArray = 0xB6 => "aclFloatArray",
        BoolArray = 0xB7 => "aclBoolArray",
        Executor = 0xB8 => "aclOpExecutor",
        TensorDescription = 0xB9 => "aclTensorDesc",
        DataBuffer = 0xBA => "aclDataBuffer",
    }
}

impl Kind {
    /// How messages say that a handle of this kind has ended.
    fn end(self) -> &'static str {
        match self {
            Kind::Executor => "already used by phase two (it was not made repeatable) or destroyed",
            Kind::Tensor => "already destroyed, by itself or with its list",
            _ => "already destroyed",
        }
    }

    /// Status of a null handle and of a wrong one.
    fn codes(self) -> (i32, i32) {
        match self {
            Kind::Context
            | Kind::Stream
            | Kind::Event
            | Kind::Graph
            | Kind::TaskGroup
            | Kind::Physical
            | Kind::Notify
            | Kind::TensorDescription
            | Kind::DataBuffer => (NULL_PARAM, INVALID_HANDLE),
            Kind::Communicator => (HCCL_PTR, HCCL_PARA),
            Kind::Executor => (ACLNN_INNER_NULLPTR, ACLNN_INVALID),
            _ => (ACLNN_NULLPTR, ACLNN_INVALID),
        }
    }
}

/// Number of the low bits that hold the serial number. Bit 55, above them, is set in every handle: on processors that
/// ignore the top byte of an address, it makes the rest one of the kernel's.
const SERIAL_BITS: u32 = 55;

/// The number behind a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Id(u64);

impl Id {
    fn new(kind: Kind, serial: u64) -> Self {
        // Serial numbers start at 1 and grow by 1, so that 2^55 of them are never used up.
        let tag = u64::from(kind as u8) << 56;
        Id(tag | 1 << SERIAL_BITS | serial & ((1 << SERIAL_BITS) - 1))
    }

    pub(crate) fn of_raw<T>(raw: *const T) -> Self {
        Id(raw.addr() as u64)
    }

    /// The handle. It has no provenance: following it is never valid, and faults.
    pub(crate) fn raw<T>(self) -> *mut T {
        ptr::without_provenance_mut(self.0 as usize)
    }

    fn kind(self) -> Option<Kind> {
        let tag = self.0 >> 56;
        let marked = self.0 >> SERIAL_BITS & 1 == 1;
        Kind::ALL.iter().copied().find(|&kind| marked && u64::from(kind as u8) == tag)
    }

    fn serial(self) -> u64 {
        self.0 & ((1 << SERIAL_BITS) - 1)
    }
}

/// Hashes the numbers of [`Id`]s, which differ in their low bits and are not chosen by an attacker.
#[derive(Default)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 ^= self.0 >> 32;
    }
}

type Entries<T> = HashMap<Id, Arc<T>, BuildHasherDefault<IdHasher>>;

/// The live objects of one kind.
#[derive(Debug)]
pub(crate) struct Table<T> {
    kind: Kind,
    serials: AtomicU64,
    entries: Lock<Entries<T>>,
}

impl<T> Table<T> {
    pub(crate) const fn new(kind: Kind) -> Self {
        Table { kind, serials: AtomicU64::new(0), entries: Lock::new(HashMap::with_hasher(BuildHasherDefault::new())) }
    }

    /// Takes a handle for an object that is inserted later.
    pub(crate) fn reserve(&self) -> Id {
        Id::new(self.kind, self.serials.fetch_add(1, Ordering::Relaxed).wrapping_add(1))
    }

    pub(crate) fn insert_at(&self, id: Id, value: Arc<T>) {
        self.entries.lock().insert(id, value);
    }

    pub(crate) fn insert(&self, value: T) -> Id {
        let id = self.reserve();
        self.insert_at(id, Arc::new(value));
        id
    }

    /// The object behind a handle.
    pub(crate) fn get<H>(&self, raw: *const H) -> Outcome<Arc<T>> {
        let id = Id::of_raw(raw);
        let found = self.entries.lock().get(&id).cloned();
        found.ok_or_else(|| self.missing(id))
    }

    /// Ends a handle; the object lives on while others hold it.
    pub(crate) fn remove<H>(&self, raw: *const H) -> Outcome<Arc<T>> {
        self.remove_id(Id::of_raw(raw))
    }

    pub(crate) fn remove_id(&self, id: Id) -> Outcome<Arc<T>> {
        let found = self.entries.lock().remove(&id);
        found.ok_or_else(|| self.missing(id))
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.lock().len()
    }

    pub(crate) fn any(&self, is: impl Fn(&T) -> bool) -> bool {
        self.entries.lock().values().any(|value| is(value))
    }

    /// The objects for which `is` returns true.
    pub(crate) fn all(&self, is: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let entries = self.entries.lock();
        entries.values().filter(|value| is(value)).cloned().collect()
    }

    /// Ends the handles of the objects for which `is` returns false.
    pub(crate) fn retain(&self, is: impl Fn(&T) -> bool) {
        self.entries.lock().retain(|_, value| is(value));
    }

    #[cold]
    fn missing(&self, id: Id) -> Failure {
        let (null, wrong) = self.kind.codes();
        let name = self.kind.name();
        if id.0 == 0 {
            return failure!(null, "{name} handle is null");
        }
        let handle = id.0;
        match id.kind() {
            Some(kind) if kind != self.kind => failure!(
                wrong,
                "{handle:#x} is the handle of a different kind of object ({}), not of a {name}",
                kind.name()
            ),
            Some(_) if id.serial() <= self.serials.load(Ordering::Relaxed) => {
                failure!(wrong, "{name} {handle:#x} was {}", self.kind.end())
            }
            _ => failure!(wrong, "{handle:#x} is no {name} handle"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::c_void;
    use std::ptr;

    static NUMBERS: Table<u32> = Table::new(Kind::Event);
    static TEXTS: Table<&str> = Table::new(Kind::Tensor);

    #[test]
    fn a_handle_finds_its_object_until_removed() {
        let id = NUMBERS.insert(7);
        let raw: *mut c_void = id.raw();
        assert_eq!(*NUMBERS.get(raw).unwrap(), 7);
        assert_eq!(*NUMBERS.remove(raw).unwrap(), 7);
        let stale = NUMBERS.get(raw).unwrap_err();
        assert_eq!(stale.code, INVALID_HANDLE);
        assert!(stale.message.contains("already destroyed"), "{stale:?}");
        assert_eq!(NUMBERS.remove(raw).unwrap_err(), stale);
    }

    #[test]
    fn wrong_handles_are_told_apart() {
        let text: *mut c_void = TEXTS.insert("x").raw();
        let foreign = NUMBERS.get(text).unwrap_err();
        assert!(foreign.message.contains("aclTensor"), "{foreign:?}");
        let null = NUMBERS.get(ptr::null::<c_void>()).unwrap_err();
        assert_eq!(null.code, NULL_PARAM);
        let local = 5u8;
        let pointer = NUMBERS.get(&raw const local).unwrap_err();
        assert!(pointer.message.contains("no event"), "{pointer:?}");
        let tensor = TEXTS.get(ptr::null::<c_void>()).unwrap_err();
        assert_eq!(tensor.code, ACLNN_NULLPTR);
    }

    #[test]
    fn numbers_are_never_used_twice() {
        let mut seen = std::collections::HashSet::new();
        for _ in 0..100 {
            let id = NUMBERS.insert(1);
            assert!(seen.insert(id));
            NUMBERS.remove_id(id).unwrap();
        }
    }
}
