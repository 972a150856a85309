//! The masks of a device, each made once.

use std::collections::hash_map::Entry as Place;
use std::fmt;
use std::sync::{Arc, Mutex};

use ascend_spec::geometry::LocalChunks;
use ascend_spec::{CompressedMask, Dims, MaskGeometry, SparseMode, TensorDesc, Visibility};
use rustc_hash::FxHashMap;

use crate::error::{Error, Result};
use crate::runtime::{Device, lock};
use crate::tensor::AnyTensor;

use super::form::MaskForm;
use super::host::HostMask;

/// The mask tensors of a device. From [`Device::masks`](crate::Device::masks) with
/// [`Masks::cache`](super::Masks::cache).
///
/// A tensor is made and copied to the device at the first request for it, by one of the requesting threads, and
/// shared from then on; the other threads wait for it. Nothing can be written to it. The cache holds at most
/// [`MaskCache::bound`] bytes: to make room it frees the least recently requested tensors, but never one that the
/// program still holds or that queued work may still read, which would free nothing. A tensor for which there is no
/// room is made nevertheless and belongs to the caller alone.
#[derive(Default)]
pub struct MaskCache(Mutex<State>);

/// What a [`MaskCache`] did, and what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheCounts {
    /// Requests answered with a tensor that was there, or that another thread was making.
    pub hits: u64,
    /// Requests for which a tensor was made.
    pub misses: u64,
    /// Tensors freed to make room.
    pub evictions: u64,
    /// Tensors made for the caller alone, since there was no room.
    pub unkept: u64,
    /// Tensors held.
    pub tensors: usize,
    /// Bytes of the tensors held and of those being made.
    pub bytes: usize,
    /// The most bytes so far.
    pub peak_bytes: usize,
}

struct State {
    slots: FxHashMap<MaskKey, Slot>,
    counts: CacheCounts,
    bound: usize,
    /// Number of the latest request.
    now: u64,
}

enum Slot {
    Ready(Box<Ready>),
    Making(Arc<Mutex<Pending>>),
}

struct Ready {
    tensor: AnyTensor,
    bytes: usize,
    /// Number of the latest request for it.
    asked: u64,
}

/// A tensor that the thread which holds the lock is making.
#[derive(Default)]
struct Pending {
    tensor: Option<AnyTensor>,
    /// Side of the causal square that this one replaces.
    grown_from: u64,
}

impl Default for State {
    fn default() -> Self {
        Self { slots: FxHashMap::default(), counts: CacheCounts::default(), bound: MaskCache::DEFAULT_BOUND, now: 0 }
    }
}

impl MaskCache {
    /// Most bytes of a cache unless set otherwise: 256 MiB.
    pub const DEFAULT_BOUND: usize = 256 << 20;

    /// Most bytes that the cache may hold.
    pub fn bound(&self) -> usize {
        lock(&self.0).bound
    }

    /// Sets the most bytes that the cache may hold, and frees what is beyond them and not in use.
    pub fn set_bound(&self, bytes: usize) {
        let mut state = lock(&self.0);
        state.bound = bytes;
        let freed = state.make_room(0);
        drop(state);
        drop(freed);
    }

    /// What the cache did, and what it holds.
    pub fn counts(&self) -> CacheCounts {
        let state = lock(&self.0);
        let ready = |slot: &&Slot| matches!(slot, Slot::Ready(_));
        CacheCounts { tensors: state.slots.values().filter(ready).count(), ..state.counts }
    }

    /// Drops every tensor. One that the program still holds, or that queued work reads, stays allocated until then.
    pub fn clear(&self) {
        let mut state = lock(&self.0);
        let mut gone = Vec::new();
        state.slots.retain(|_, slot| match slot {
            Slot::Ready(ready) => {
                gone.push(ready.tensor.clone());
                false
            }
            Slot::Making(_) => true,
        });
        let bytes = gone.iter().map(bytes_of).sum::<usize>();
        state.counts.bytes = state.counts.bytes.saturating_sub(bytes);
        drop(state);
        drop(gone);
    }

    /// Returns `view` of the tensor of a key, which for the causal square has at least `least` rows. On a hit `view`
    /// gets the cache's own tensor by reference: clones would be most of the cost.
    #[inline]
    pub(super) fn get<T>(
        &self,
        device: &Device,
        key: &MaskKey,
        least: u64,
        view: impl FnOnce(&AnyTensor) -> T,
    ) -> Result<T> {
        if let Some(tensor) = lock(&self.0).hit(key, least) {
            return Ok(view(tensor));
        }
        let tensor = self.get_or_make(device, key, least)?;
        Ok(view(&tensor))
    }

    /// Returns the tensor of a key that the cache did not have a moment ago, and makes it unless another thread has.
    #[cold]
    fn get_or_make(&self, device: &Device, key: &MaskKey, least: u64) -> Result<AnyTensor> {
        loop {
            let pending = {
                let mut state = lock(&self.0);
                if let Some(tensor) = state.hit(key, least) {
                    return Ok(tensor.clone());
                }
                let state = &mut *state;
                match state.slots.entry(*key) {
                    Place::Occupied(mut place) => match place.get_mut() {
                        Slot::Making(pending) => Arc::clone(pending),
                        Slot::Ready(small) => {
                            let pending = Pending { tensor: None, grown_from: side(&small.tensor) };
                            state.counts.bytes = state.counts.bytes.saturating_sub(small.bytes);
                            let pending = Arc::new(Mutex::new(pending));
                            place.insert(Slot::Making(Arc::clone(&pending)));
                            pending
                        }
                    },
                    Place::Vacant(place) => {
                        let pending = Arc::<Mutex<Pending>>::default();
                        place.insert(Slot::Making(Arc::clone(&pending)));
                        pending
                    }
                }
            };
            let mut making = lock(&pending);
            match &making.tensor {
                Some(tensor) if side(tensor) >= least => {
                    let mut state = lock(&self.0);
                    state.counts.hits = state.counts.hits.saturating_add(1);
                    return Ok(tensor.clone());
                }
                // Another thread made it meanwhile, for a request of fewer rows.
                Some(_) => continue,
                None => {}
            }
            let made = self.make(device, key, least, making.grown_from);
            let mut state = lock(&self.0);
            let own = |slot: &Slot| matches!(slot, Slot::Making(other) if Arc::ptr_eq(other, &pending));
            let is_own = state.slots.get(key).is_some_and(own);
            let (tensor, kept) = match made {
                Ok(made) => made,
                Err(error) => {
                    if is_own {
                        state.slots.remove(key);
                    }
                    return Err(error);
                }
            };
            state.counts.misses = state.counts.misses.saturating_add(1);
            let bytes = bytes_of(&tensor);
            if kept && is_own {
                let ready = Ready { tensor: tensor.clone(), bytes, asked: state.now };
                state.slots.insert(*key, Slot::Ready(Box::new(ready)));
            } else {
                if kept {
                    state.counts.bytes = state.counts.bytes.saturating_sub(bytes);
                }
                if is_own {
                    state.slots.remove(key);
                }
                state.counts.unkept = state.counts.unkept.saturating_add(1);
            }
            making.tensor = Some(tensor.clone());
            return Ok(tensor);
        }
    }

    /// Makes a tensor. Returns it, and whether there is room to keep it.
    fn make(&self, device: &Device, key: &MaskKey, least: u64, grown_from: u64) -> Result<(AnyTensor, bool)> {
        let square = |side: u64| MaskGeometry::new(SparseMode::LeftUpCausal, true, side, side, 0, 0);
        match key.content {
            Content::Template(template) => self.make_of(device, &template.geometry(), key.form),
            Content::Geometry(geometry) => self.make_of(device, &geometry, key.form),
            Content::Local(chunks) => self.make_of(device, &chunks, key.form),
            Content::CausalSquare => {
                let doubled = least.max(grown_from.saturating_mul(2));
                // Doubling the side is of no use where it fills the cache.
                let fits = bytes_for(key.form, doubled, doubled).is_ok_and(|bytes| bytes <= self.bound() / 2);
                let side = if fits { doubled } else { least };
                self.make_of(device, &square(side), key.form)
            }
        }
    }

    fn make_of(&self, device: &Device, mask: &impl Visibility, form: MaskForm) -> Result<(AnyTensor, bool)> {
        let bytes = bytes_for(form, mask.q_len(), mask.kv_len())?;
        let kept = {
            let mut state = lock(&self.0);
            let freed = state.make_room(bytes);
            let sum = state.counts.bytes.checked_add(bytes);
            let sum = sum.filter(|sum| *sum <= state.bound);
            if let Some(sum) = sum {
                state.counts.bytes = sum;
                state.counts.peak_bytes = state.counts.peak_bytes.max(sum);
            }
            let kept = sum.is_some();
            drop(state);
            // Evicted tensors are freed before anything is allocated.
            drop(freed);
            kept
        };
        let made = HostMask::of(mask, form).and_then(|mask| upload(device, &mask));
        if let Ok(tensor) = &made {
            // One caller's change would be every later caller's mask.
            tensor.freeze();
        }
        if made.is_err() && kept {
            let mut state = lock(&self.0);
            state.counts.bytes = state.counts.bytes.saturating_sub(bytes);
        }
        Ok((made?, kept))
    }
}

impl State {
    /// Returns the tensor of a key if the cache has it and, for the causal square, it has enough rows.
    #[inline]
    fn hit(&mut self, key: &MaskKey, least: u64) -> Option<&AnyTensor> {
        self.now = self.now.saturating_add(1);
        let Slot::Ready(ready) = self.slots.get_mut(key)? else {
            return None;
        };
        if side(&ready.tensor) < least {
            return None;
        }
        ready.asked = self.now;
        self.counts.hits = self.counts.hits.saturating_add(1);
        Some(&ready.tensor)
    }

    /// Removes tensors that are not in use, the least recently requested first, until `bytes` more bytes fit, and
    /// returns them. Removes none if `bytes` exceeds the bound.
    fn make_room(&mut self, bytes: usize) -> Vec<AnyTensor> {
        let mut freed = Vec::new();
        if bytes > self.bound {
            return freed;
        }
        if self.counts.bytes.saturating_add(bytes) <= self.bound {
            return freed;
        }
        let ready = |(key, slot): (&MaskKey, &Slot)| match slot {
            Slot::Ready(ready) => Some((ready.asked, *key)),
            Slot::Making(_) => None,
        };
        let mut oldest_first: Vec<(u64, MaskKey)> = self.slots.iter().filter_map(ready).collect();
        oldest_first.sort_unstable_by_key(|&(asked, _)| asked);
        for (_, key) in oldest_first {
            if self.counts.bytes.saturating_add(bytes) <= self.bound {
                break;
            }
            if let Place::Occupied(place) = self.slots.entry(key)
                && matches!(place.get(), Slot::Ready(ready) if ready.tensor.is_idle())
                && let Slot::Ready(ready) = place.remove()
            {
                self.counts.bytes = self.counts.bytes.saturating_sub(ready.bytes);
                self.counts.evictions = self.counts.evictions.saturating_add(1);
                freed.push(ready.tensor);
            }
        }
        freed
    }
}

/// Copies a mask to a device.
pub(super) fn upload(device: &Device, mask: &HostMask) -> Result<AnyTensor> {
    let axis = |size: usize| i64::try_from(size).unwrap_or(i64::MAX);
    let shape = match mask.axes() {
        (None, rows, keys) => Dims::of([axis(rows), axis(keys)]),
        (Some(batch), rows, keys) => Dims::of([axis(batch), axis(rows), axis(keys)]),
    };
    let desc = TensorDesc::packed(mask.form().dtype(), shape);
    let tensor = AnyTensor::empty(device.context(), desc)?;
    tensor.memory().write(0, mask.bytes())?;
    Ok(tensor)
}

fn bytes_for(form: MaskForm, rows: u64, keys: u64) -> Result<usize> {
    rows.checked_mul(keys)
        .and_then(|elements| form.dtype().bytes_for(elements))
        .and_then(|bytes| usize::try_from(bytes).ok())
        .ok_or_else(|| {
            Error::invalid(
                "mask",
                format_args!("{rows} rows of {keys} keys"),
                format_args!("at most {} bytes", HostMask::MAX_BYTES),
            )
            .fix("use a template, which serves every length: sparse modes 2, 3 and 4")
        })
}

fn bytes_of(tensor: &AnyTensor) -> usize {
    tensor.memory().bytes()
}

fn side(tensor: &AnyTensor) -> u64 {
    tensor.shape().first().map_or(0, |rows| *rows as u64)
}

impl fmt::Debug for MaskCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MaskCache").field("bound", &self.bound()).field("counts", &self.counts()).finish()
    }
}

/// Everything that the content of a cached mask depends on. The device is the cache's own.
///
/// A formula is its own key: window, sinks, lengths, alignment and the place of a chunk in its prompt are all part of
/// it, so that none can be forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct MaskKey {
    pub(super) content: Content,
    pub(super) form: MaskForm,
}

/// What a cached mask shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Content {
    /// A template.
    Template(CompressedMask),
    /// A formula: the full masks of the sparse modes, parts of the causal triangle.
    Geometry(MaskGeometry),
    /// Chunks.
    Local(LocalChunks),
    /// The causal square that all smaller causal masks are views of. It grows, so that its side is no part of the key.
    CausalSquare,
}
