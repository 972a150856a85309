//! The cases of the benchmark: attention calls by name, described, checked by the contract and filled with numbers.

use crate::random::Random;
use ascend_attention::spec::attention_problem::{AttentionProblem, SoftmaxOutputs, TensorRole};
use ascend_attention::spec::geometry::{TriangleMix, TrianglePart, TriangleRows};
use ascend_attention::spec::ops::flash_attention_score::{self, FlashAttentionCall};
use ascend_attention::spec::ops::fused_infer_attention_score::{Argument, FiaCall, Parameter, Version};
use ascend_attention::spec::{DType, Extents, Layout, MaskGeometry, Soc, SparseMode, Target, TensorDesc, Violation};
use ascend_attention::{bf16, f16};
use ascend_emu::kernel::{self, Buffers, RunOptions};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The keys that a row sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sight {
    All,
    Causal,
    /// This number of keys up to the row's own.
    Window(i64),
    /// A mask tensor that hides each tenth key, at random.
    Random,
    /// A mask tensor that hides the same keys as `Causal`.
    Triangular,
    /// Sinks, window and last rows of a deep layer of TriangleMix, which the kernels take as a geometry.
    Triangle(TriangleMix),
}

/// One call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    batch: i64,
    heads: i64,
    kv_heads: i64,
    rows: i64,
    keys: i64,
    dim: i64,
    /// Number of elements in the rotary part.
    rope: i64,
    sight: Sight,
    paged: bool,
    /// Whether keys and values are stored as `INT8`, with a scale for each channel.
    stored: bool,
    /// Whether FlashAttentionScore computes the case, and writes maximum and sum of each row too.
    training: bool,
}

const fn case(name: &'static str, [batch, heads, kv_heads, rows, keys, dim]: [i64; 6], sight: Sight) -> Case {
    Case { name, batch, heads, kv_heads, rows, keys, dim, rope: 0, sight, paged: false, stored: false, training: false }
}

/// All cases.
pub(crate) const CASES: &[Case] = &[
    case("causal_1024_h8_d128", [1, 8, 8, 1024, 1024, 128], Sight::Causal),
    case("causal_2048_h8_d128", [1, 8, 8, 2048, 2048, 128], Sight::Causal),
    case("causal_4096_h8_d128", [1, 8, 8, 4096, 4096, 128], Sight::Causal),
    Case { training: true, ..case("flash_causal_4k", [1, 8, 8, 4096, 4096, 128], Sight::Causal) },
    case("causal_2048_h32kv8_d128", [1, 32, 8, 2048, 2048, 128], Sight::Causal),
    case("full_2048_h8_d64", [1, 8, 8, 2048, 2048, 64], Sight::All),
    case("mask_2048_h8_d128", [1, 8, 8, 2048, 2048, 128], Sight::Random),
    case("tril_mask_2048_h8_d128", [1, 8, 8, 2048, 2048, 128], Sight::Triangular),
    case("decode_b16_h32kv8_4096_d128", [16, 32, 8, 1, 4096, 128], Sight::All),
    Case { paged: true, ..case("decode_paged_b16_h32kv8_4096_d128", [16, 32, 8, 1, 4096, 128], Sight::All) },
    Case { stored: true, ..case("decode_int8_b16_h32kv8_4096_d128", [16, 32, 8, 1, 4096, 128], Sight::All) },
    case("swa512_8192_h4_d128", [1, 4, 4, 8192, 8192, 128], Sight::Window(512)),
    case("triangle_32k", LONG, Sight::Triangle(TriangleMix::GUIDE_LONG_CONTEXT)),
    case("dense_32k", LONG, Sight::Causal),
    Case { paged: true, rope: 64, ..case("mla_decode_8x4k", [8, 32, 1, 1, 4096, 512], Sight::All) },
];

/// Sizes of a long prompt.
const LONG: [i64; 6] = [1, 4, 1, 32768, 32768, 128];

/// Tokens in a block of a paged cache.
const BLOCK: i64 = 128;

/// A call that is ready to run.
#[derive(Debug)]
pub(crate) struct Prepared {
    case: Case,
    /// Element type of query, key, value and output.
    held: DType,
    key: Vec<TensorDesc>,
    plain: FiaCall<'static>,
    kv_lens: Option<Vec<i64>>,
    tensors: Vec<(Argument, Vec<u64>)>,
    /// Maximum and sum of each row, if they are written.
    softmax: [Vec<f32>; 2],
}

impl Case {
    /// Number of scores that a kernel computes if it leaves out no visible and computes no hidden one.
    fn scores(&self) -> f64 {
        let (rows, keys) = (self.rows as f64, self.keys as f64);
        let a_head = match self.sight {
            Sight::All => rows * keys,
            Sight::Random => rows * keys * 0.9,
            Sight::Causal | Sight::Triangular => rows * (rows + 1.0) / 2.0,
            Sight::Window(size) => {
                let size = size as f64;
                size * (size + 1.0) / 2.0 + (rows - size) * size
            }
            Sight::Triangle(mix) => self.triangle(mix).visible() as f64,
        };
        a_head * (self.batch * self.heads) as f64
    }

    fn triangle(&self, mix: TriangleMix) -> MaskGeometry {
        mix.geometry(TrianglePart::Triangle, TriangleRows::whole(self.rows.unsigned_abs()))
    }

    /// Floating-point operations of both products over the visible scores.
    pub(crate) fn flops(&self) -> f64 {
        self.scores() * 2.0 * (self.dim + self.rope + self.dim) as f64
    }

    /// Least number of bytes that have to move: those of each tensor once.
    pub(crate) fn bytes(&self, held: DType) -> f64 {
        let size = held.size().unwrap_or(0) as f64;
        let query = self.batch * self.heads * self.rows * (2 * self.dim + self.rope);
        let cached = match self.rope {
            // The value is a part of the key's tensor.
            1.. => self.dim + self.rope,
            _ => 2 * self.dim,
        };
        let cache = self.batch * self.kv_heads * self.keys * cached;
        let cached_size = if self.stored { 1.0 } else { size };
        query as f64 * size + cache as f64 * cached_size
    }

    /// Describes the call and fills its tensors; `FLOAT` is passed to the kernels in single precision.
    pub(crate) fn prepare(self, held: DType) -> Result<Prepared, String> {
        let described = match held {
            DType::Float => DType::Float16,
            half => half,
        };
        let layout = Layout::Bnsd;
        let extents = |heads, rows, dim| Extents { batch: self.batch, heads, rows, dim };
        let desc =
            |dtype, shape: &[i64]| TensorDesc::contiguous(dtype, shape).ok_or_else(|| format!("no shape {shape:?}"));
        let query = extents(self.heads, self.rows, self.dim);
        let mut plain = FiaCall::new(layout.as_str());
        plain.query = Some(TensorDesc::packed(described, layout.input().shape(query)));
        plain.attention_out = Some(TensorDesc::packed(described, layout.out_shape(query)));
        plain.num_heads = self.heads;
        plain.num_key_value_heads = self.kv_heads;
        plain.scale = 1.0 / ((self.dim + self.rope) as f64).sqrt();
        let blocks = self.batch * self.keys / BLOCK;
        let cached = if self.stored { DType::Int8 } else { described };
        let cache = |dim| match self.paged {
            true => desc(cached, &[blocks, self.kv_heads, BLOCK, dim]),
            false => desc(cached, &[self.batch, self.kv_heads, self.keys, dim]),
        };
        if self.stored {
            let scale = desc(described, &[1, self.kv_heads * self.dim])?;
            plain.key_antiquant_scale = Some(scale);
            plain.value_antiquant_scale = Some(scale);
        }
        let mut kv_lens = None;
        if self.paged {
            plain.block_size = BLOCK;
            plain.block_table = Some(desc(DType::Int32, &[self.batch, self.keys / BLOCK])?);
            kv_lens = Some(vec![self.keys; self.batch as usize]);
        }
        if self.rope > 0 {
            let rope = extents(self.heads, self.rows, self.rope);
            plain.query_rope = Some(TensorDesc::packed(described, layout.input().shape(rope)));
            plain.key_rope = Some(cache(self.rope)?);
        }
        let mode = match self.sight {
            Sight::Causal => SparseMode::RightDownCausal,
            Sight::Window(size) => {
                (plain.pre_tokens, plain.next_tokens) = (size - 1, 0);
                SparseMode::Band
            }
            _ => SparseMode::DefaultMask,
        };
        plain.sparse_mode = mode.acl();
        plain.atten_mask = match self.sight {
            Sight::All | Sight::Triangle(_) => None,
            Sight::Causal | Sight::Window(_) => Some(desc(DType::Bool, &[SparseMode::COMPRESSED_MASK_SIZE; 2])?),
            Sight::Random | Sight::Triangular => Some(desc(DType::Bool, &[self.rows, self.keys])?),
        };
        let mut prepared = Prepared {
            case: self,
            held,
            key: vec![cache(self.dim)?],
            plain,
            kv_lens,
            tensors: Vec::new(),
            softmax: [(); 2].map(|()| match self.training {
                true => {
                    vec![0.0; (self.batch * self.heads * self.rows) as usize * SoftmaxOutputs::COPIES]
                }
                false => Vec::new(),
            }),
        };
        prepared.fill()?;
        Ok(prepared)
    }
}

impl Prepared {
    fn call(&self) -> FiaCall<'_> {
        FiaCall {
            key: &self.key,
            value: &self.key,
            actual_seq_lengths_kv: self.kv_lens.as_deref(),
            ..self.plain.clone()
        }
    }

    /// This call as a call of FlashAttentionScore, which takes `FLOAT`.
    fn training_call<'a>(&self, call: &FiaCall<'_>) -> Result<FlashAttentionCall<'a>, String> {
        let rows = [self.case.batch, self.case.heads, self.case.rows, SoftmaxOutputs::COPIES as i64];
        let softmax = TensorDesc::contiguous(DType::Float, &rows).ok_or("no softmax outputs")?;
        let held = |desc: Option<TensorDesc>| {
            let dtype = self.held;
            desc.map(|desc| TensorDesc { dtype, ..desc })
        };
        Ok(FlashAttentionCall {
            query: held(call.query),
            key: held(call.key.first().copied()),
            value: held(call.value.first().copied()),
            atten_mask: call.atten_mask,
            scale: call.scale,
            num_heads: call.num_heads,
            sparse_mode: call.sparse_mode,
            softmax_max: Some(softmax),
            softmax_sum: Some(softmax),
            attention_out: held(call.attention_out),
            ..FlashAttentionCall::new("BNSD")
        })
    }

    /// Resolves the call and passes it to `work`.
    pub(crate) fn with<R>(&mut self, work: impl FnOnce(&mut Ready<'_>) -> R) -> Result<R, String> {
        let mut tensors = std::mem::take(&mut self.tensors);
        let mut softmax = std::mem::take(&mut self.softmax);
        let call = self.call();
        let target = Target::snapshot(Soc::AtlasA2);
        let refused = |refusal: Violation| refusal.to_string();
        let checked = call.check(Version::V4, target).map_err(refused)?;
        let training = match self.case.training {
            true => {
                let call = self.training_call(&call)?;
                let checked = call.check(flash_attention_score::Version::V2, target);
                let problem = checked.map_err(refused)?.attention();
                Some(problem.map_err(|unsupported| unsupported.to_string())?)
            }
            false => None,
        };
        let result = work(&mut Ready {
            single: self.held == DType::Float && !self.case.training,
            geometry: match self.case.sight {
                Sight::Triangle(mix) => Some(self.case.triangle(mix)),
                _ => None,
            },
            problem: training.as_ref().unwrap_or(&checked.problem),
            tensors: &mut tensors,
            softmax: &mut softmax,
            working_memory: AtomicUsize::new(0),
        });
        (self.tensors, self.softmax) = (tensors, softmax);
        Ok(result)
    }

    /// Fills every tensor of the call with numbers.
    fn fill(&mut self) -> Result<(), String> {
        let call = self.call();
        let parameters = [
            Parameter::Query,
            Parameter::QueryRope,
            Parameter::Key,
            Parameter::Value,
            Parameter::KeyRope,
            Parameter::KeyAntiquantScale,
            Parameter::ValueAntiquantScale,
            Parameter::AttenMask,
            Parameter::BlockTable,
            Parameter::AttentionOut,
        ];
        let mut tensors = Vec::new();
        for parameter in parameters {
            // The absorbed form has key and value in one tensor.
            if parameter == Parameter::Value && self.case.rope > 0 {
                continue;
            }
            let Some(desc) = call.tensor(parameter) else {
                continue;
            };
            let held = match parameter {
                Parameter::AttenMask
                | Parameter::BlockTable
                | Parameter::KeyAntiquantScale
                | Parameter::ValueAntiquantScale => desc.dtype,
                _ if desc.dtype == DType::Int8 => desc.dtype,
                _ => self.held,
            };
            let count = desc.elements().unwrap_or(0) as usize;
            let size = held.size().unwrap_or(1);
            let mut words = vec![0u64; (count * size).div_ceil(8)];
            let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ count as u64);
            match parameter {
                Parameter::AttentionOut => {}
                Parameter::AttenMask => {
                    let columns = self.case.keys as usize;
                    let sight = self.case.sight;
                    each(&mut words, |at| match sight {
                        Sight::Triangular => u8::from(at % columns > at / columns),
                        Sight::Random => u8::from(random.bits().is_multiple_of(10)),
                        _ => 0,
                    });
                }
                Parameter::BlockTable => {
                    let mut ids: Vec<u32> = (0..count as u32).collect();
                    for last in (1..count).rev() {
                        ids.swap(last, (random.bits() % (last as u64 + 1)) as usize);
                    }
                    each(&mut words, |at| ids.get(at).copied().unwrap_or(0));
                }
                _ => match held {
                    DType::Float16 => {
                        each(&mut words, |_| f16::from_f32(random.number()).to_bits());
                    }
                    DType::Bf16 => each(&mut words, |_| bf16::from_f32(random.number()).to_bits()),
                    DType::Int8 => each(&mut words, |_| random.bits() as u8),
                    _ => each(&mut words, |_| random.number().to_bits()),
                },
            }
            tensors.push((parameter.into(), words));
        }
        self.tensors = tensors;
        Ok(())
    }
}

/// A resolved call, and the memory of its tensors.
#[derive(Debug)]
pub(crate) struct Ready<'a> {
    single: bool,
    geometry: Option<MaskGeometry>,
    problem: &'a AttentionProblem<'a>,
    tensors: &'a mut Vec<(Argument, Vec<u64>)>,
    softmax: &'a mut [Vec<f32>; 2],
    working_memory: AtomicUsize,
}

impl Ready<'_> {
    /// Number of bytes that the last run used besides its tensors, over all threads.
    pub(crate) fn working_memory(&self) -> usize {
        self.working_memory.load(Ordering::Relaxed)
    }

    /// Computes the call once on the current pool.
    pub(crate) fn run(&mut self) -> Result<(), String> {
        let base: Vec<(Argument, *mut u8)> =
            self.tensors.iter_mut().map(|(argument, words)| (*argument, words.as_mut_ptr().cast())).collect();
        let softmax = self.softmax.each_mut().map(Vec::as_mut_ptr);
        let base = |role: TensorRole| {
            match role {
                TensorRole::SoftmaxMax => return softmax[0].cast(),
                TensorRole::SoftmaxSum => return softmax[1].cast(),
                _ => {}
            }
            let Some(wanted) = Argument::of_role(role) else {
                return std::ptr::null_mut();
            };
            let find = |wanted| base.iter().find(|(argument, _)| *argument == wanted);
            let found = find(wanted).or_else(|| match wanted.parameter {
                Parameter::Value => find(Argument::element(Parameter::Key, wanted.index)),
                _ => None,
            });
            found.map_or(std::ptr::null_mut(), |&(_, address)| address)
        };
        let buffers = Buffers(&base);
        let options = RunOptions {
            single: self.single,
            geometry: self.geometry.as_ref(),
            working_memory: Some(&self.working_memory),
            ..RunOptions::default()
        };
        // SAFETY: each tensor has the memory of its description, four bytes an element where single precision is held.
        let done = unsafe { kernel::run_with(self.problem, &buffers, &options) };
        done.map_err(|unsupported| unsupported.to_string())
    }
}

/// An integer type that tensors are filled with, by its bytes in memory.
trait Bits: Copy {
    const SIZE: usize;
    fn widen(self) -> u64;
}

macro_rules! bits {
    ($($type:ty),*) => {$(
        impl Bits for $type {
            const SIZE: usize = size_of::<$type>();
            fn widen(self) -> u64 {
                u64::from(self)
            }
        }
    )*};
}

bits!(u8, u16, u32);

/// Writes number after number into memory, in the machine's byte order.
fn each<T: Bits>(words: &mut [u64], mut number: impl FnMut(usize) -> T) {
    let lanes = 8 / T::SIZE;
    for (index, word) in words.iter_mut().enumerate() {
        *word = 0;
        for lane in 0..lanes {
            let place = if cfg!(target_endian = "little") { lane } else { lanes - 1 - lane };
            *word |= number(index * lanes + lane).widen() << (8 * T::SIZE * place);
        }
    }
}
