//! Every golden case that the typed builder can say comes out of it with the bits of the same call by name, for the
//! tensors of a launch rather than those of its plan; and the call by name agrees with the expected numbers.

use crate::harness;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{env, fs};

use ascend_attention::attention::{
    Affine, AntiquantMode, Antiquantisation, BlockTable, Inputs, PaddingSize, Parameter as P, PseShift, Quantisation,
    SharedPrefix,
};
use ascend_attention::case::{AttentionCase, Case, CaseTensor, Expect, MaskSource, Verdict};
use ascend_attention::spec::Level;
use ascend_attention::spec::ops::fused_infer_attention_score::rules;
use ascend_attention::{
    AnyTensor, CausalOrigin, DType, Element, FusedInferAttention, InnerPrecise, Layout, Mask, Output, Stream, Tensor,
    bf16, f16,
};

/// The tensors of a case on the device.
struct Uploaded {
    tensors: BTreeMap<P, AnyTensor>,
    key: Vec<AnyTensor>,
    value: Vec<AnyTensor>,
    block_table: Option<BlockTable>,
    quant_scale1: Option<Tensor<f32>>,
    paddings: [Option<PaddingSize>; 2],
    sink: Option<Tensor<bf16>>,
    latent: Vec<Tensor<f32>>,
}

fn upload(stream: &Stream, tensor: &CaseTensor) -> AnyTensor {
    stream.upload_bytes(tensor.dtype(), tensor.bytes(), tensor.shape()).unwrap()
}

fn typed<T: Element>(tensor: Option<&AnyTensor>) -> Option<Tensor<T>> {
    tensor.map(|tensor| tensor.clone().typed().unwrap())
}

impl Uploaded {
    fn new(stream: &Stream, case: &AttentionCase) -> Self {
        let all = |list: &[CaseTensor]| list.iter().map(|one| upload(stream, one)).collect();
        let tensors: BTreeMap<P, AnyTensor> = case
            .arguments
            .each_tensor()
            .filter(|(of, _)| of.parameter.info().list.is_none())
            .map(|(of, tensor)| (of.parameter, upload(stream, tensor)))
            .collect();
        let table = typed::<i32>(tensors.get(&P::BlockTable));
        let block_size = usize::try_from(case.arguments.block_size).unwrap();
        let latent = [P::DequantScaleQuery, P::KeyAntiquantScale, P::ValueAntiquantScale];
        let is_latent = tensors.contains_key(&P::DequantScaleQuery);
        Self {
            // SAFETY: a golden case names blocks of its cache for every key.
            block_table: table.map(|table| unsafe { BlockTable::from_tensor(table, block_size) }.unwrap()),
            quant_scale1: typed(tensors.get(&P::QuantScale1)),
            paddings: [P::QueryPaddingSize, P::KvPaddingSize].map(|at| {
                // SAFETY: the padding of a golden case leaves room for its rows.
                typed(tensors.get(&at)).map(|size| unsafe { PaddingSize::from_tensor(size) })
            }),
            sink: typed(tensors.get(&P::LearnableSink)),
            latent: match is_latent {
                true => latent.iter().map(|at| typed(tensors.get(at)).unwrap()).collect(),
                false => Vec::new(),
            },
            key: all(&case.arguments.key),
            value: all(&case.arguments.value),
            tensors,
        }
    }

    fn affine(&self, scale: P, offset: P) -> Option<Affine<'_>> {
        Some(Affine { scale: self.tensors.get(&scale)?, offset: self.tensors.get(&offset) })
    }

    fn quantisation(&self, case: &AttentionCase) -> Quantisation<'_> {
        let of = &case.arguments;
        let output = self.affine(P::QuantScale2, P::QuantOffset2);
        let merged = self.affine(P::AntiquantScale, P::AntiquantOffset);
        let key = self.affine(P::KeyAntiquantScale, P::KeyAntiquantOffset);
        let value = self.affine(P::ValueAntiquantScale, P::ValueAntiquantOffset);
        let antiquantisation = match (merged, key, value) {
            _ if !self.latent.is_empty() => {
                return Quantisation::Latent {
                    dequant_scale_query: &self.latent[0],
                    key_scale: &self.latent[1],
                    value_scale: &self.latent[2],
                };
            }
            (Some(both), None, None) if of.antiquant_mode == 0 => Antiquantisation::Merged(both),
            (Some(both), None, None) => Antiquantisation::MergedPerToken(both),
            (None, Some(key), Some(value)) if of.key_antiquant_mode == of.value_antiquant_mode => {
                let mode = AntiquantMode::from_acl(of.key_antiquant_mode).unwrap();
                Antiquantisation::Split { mode, key, value }
            }
            (None, Some(key), Some(value)) => Antiquantisation::PerChannelKeyPerTokenValue { key, value },
            (None, None, None) => match (&self.quant_scale1, output) {
                (Some(quant_scale1), output) => {
                    return Quantisation::Int8 {
                        deq_scale1: &self.tensors[&P::DeqScale1],
                        quant_scale1,
                        deq_scale2: &self.tensors[&P::DeqScale2],
                        output,
                    };
                }
                (None, Some(output)) => return Quantisation::Output(output),
                (None, None) => return Quantisation::None,
            },
            other => panic!("{}: {other:?}", case.name),
        };
        Quantisation::KeyValue { antiquantisation, output }
    }

    /// Key and value, to be borrowed.
    fn lists(&self) -> [Vec<&AnyTensor>; 2] {
        [self.key.iter().collect(), self.value.iter().collect()]
    }

    fn inputs<'a, T: Element>(
        &'a self,
        case: &AttentionCase,
        [key, value]: &'a [Vec<&'a AnyTensor>; 2],
    ) -> Inputs<'a, T> {
        let mut inputs = Inputs::lists_of_any(&self.tensors[&P::Query], key, value);
        inputs = inputs.quantisation(self.quantisation(case));
        if let Some(table) = &self.block_table {
            inputs = inputs.paged(table);
        }
        if let Some(query) = self.tensors.get(&P::QueryRope) {
            inputs = inputs.rope_of_any(query, &self.tensors[&P::KeyRope]);
        }
        if let Some(key) = self.tensors.get(&P::KeySharedPrefix) {
            let mut prefix = SharedPrefix::of_any(key, &self.tensors[&P::ValueSharedPrefix]);
            if let Some(len) = &case.arguments.actual_shared_prefix_len {
                prefix = prefix.valid(usize::try_from(len[0]).unwrap()).unwrap();
            }
            inputs = inputs.shared_prefix(prefix);
        }
        if let Some(pse) = self.tensors.get(&P::PseShift) {
            inputs = inputs.pse_shift(PseShift::Added(pse));
        }
        if let Some(padding) = &self.paddings[0] {
            inputs = inputs.query_padding(padding);
        }
        if let Some(padding) = &self.paddings[1] {
            inputs = inputs.kv_padding(padding);
        }
        if let Some(sink) = &self.sink {
            inputs = inputs.learnable_sink(sink);
        }
        inputs
    }

    /// Every tensor but the block table, whose content has to stay one.
    fn spoil(&self, stream: &Stream) {
        let kept = [P::BlockTable, P::QueryPaddingSize, P::KvPaddingSize, P::AttenMask];
        let singles = self.tensors.iter().filter(|(at, _)| !kept.contains(at));
        let tensors = singles.map(|(_, tensor)| tensor);
        for tensor in tensors.chain(&self.key).chain(&self.value) {
            let bytes = tensor.download_bytes(stream).unwrap().len();
            tensor.overwrite_bytes(stream, &vec![0x3c; bytes]).unwrap();
        }
    }
}

/// Lengths of an accepted call, none of them negative.
fn sizes(lengths: &[i64]) -> Vec<usize> {
    let size = |len: &i64| usize::try_from(*len).unwrap();
    lengths.iter().map(size).collect()
}

fn call(stream: &Stream, case: &AttentionCase, uploaded: &Uploaded) -> FusedInferAttention {
    let of = &case.arguments;
    let masks = stream.device().masks();
    let full = uploaded.tensors.get(&P::AttenMask);
    let mask = match (of.sparse_mode, case.mask, full) {
        (_, MaskSource::None, None) => Mask::none(),
        (0, MaskSource::Tensor, Some(full)) => Mask::default_mask(full.clone(), of.pre_tokens, of.next_tokens),
        (1, MaskSource::Tensor, Some(full)) => Mask::all_mask(full.clone()),
        (2, MaskSource::Compressed, None) => masks.causal(CausalOrigin::LeftUp).unwrap(),
        (3, MaskSource::Compressed, None) => masks.causal(CausalOrigin::RightDown).unwrap(),
        (4, MaskSource::Compressed, None) => masks.band(of.pre_tokens, of.next_tokens).unwrap(),
        other => panic!("{}: {other:?}", case.name),
    };
    let mut call = FusedInferAttention::new(Layout::parse(&of.input_layout).unwrap())
        .heads(of.num_heads as usize)
        .kv_heads(of.num_key_value_heads as usize)
        .scale(of.scale)
        .mask(mask)
        .softmax_lse(of.softmax_lse_flag)
        .inner_precise(match of.inner_precise {
            0 => InnerPrecise::HighPrecision,
            1 => InnerPrecise::HighPerformance,
            2 => InnerPrecise::HighPrecisionCorrected,
            3 => InnerPrecise::HighPerformanceCorrected,
            other => panic!("{}: innerPrecise {other}", case.name),
        });
    if let Some(lengths) = &of.actual_seq_lengths {
        call = call.actual_seq_lengths(sizes(lengths));
    }
    if let Some(lengths) = &of.actual_seq_lengths_kv {
        call = call.actual_seq_lengths_kv(sizes(lengths));
    }
    // As when a case is run: its verdict is the operator's.
    for lint in rules::lints::all().filter(|lint| lint.level == Level::Lint && !lint.overruns) {
        call = call.allow_lint(lint.id);
    }
    call
}

fn bytes<T: Element>(stream: &Stream, output: &Output<T>) -> [Option<Vec<u8>>; 2] {
    let attention = output.attention.download_bytes(stream).unwrap();
    let lse = output.softmax_lse.as_ref();
    [Some(attention), lse.map(|lse| lse.download_bytes(stream).unwrap())]
}

/// Plans with one copy of the inputs, spoils it, and launches with another: the outputs are those of the second.
fn by_type<T: Element>(stream: &Stream, case: &AttentionCase) -> [Option<Vec<u8>>; 2] {
    let (first, second) = (Uploaded::new(stream, case), Uploaded::new(stream, case));
    let plan = call(stream, case, &first)
        .plan(first.inputs::<T>(case, &first.lists()))
        .unwrap_or_else(|error| panic!("{}: {error}", case.name));
    let mut output = plan.output::<T>().unwrap();
    let poison = |tensor: &AnyTensor| {
        let bytes = tensor.len() * tensor.dtype().size().unwrap();
        tensor.overwrite_bytes(stream, &vec![0xff; bytes]).unwrap();
    };
    poison(&output.attention);
    output.softmax_lse.iter().for_each(|lse| poison(lse));
    first.spoil(stream);
    plan.launch_into(stream, second.inputs(case, &second.lists()), &mut output)
        .unwrap_or_else(|error| panic!("{}: {error}", case.name));
    bytes(stream, &output)
}

/// Which kinds of tensors a case has: what the typed builder has to say about it.
fn kinds(case: &AttentionCase) -> Vec<String> {
    let of = &case.arguments;
    let mut kinds: Vec<String> = (of.each_tensor())
        .filter(|(of, _)| of.parameter.info().list.is_none())
        .map(|(of, _)| of.name().to_owned())
        .collect();
    if case.tensor(P::KeyAntiquantScale).is_some() {
        kinds.push(format!("modes {} {}", of.key_antiquant_mode, of.value_antiquant_mode));
    }
    if case.tensor(P::AntiquantScale).is_some() {
        kinds.push(format!("mode {}", of.antiquant_mode));
    }
    if case.arguments.key.len() > 1 {
        kinds.push("list".to_owned());
    }
    if case.tensor(P::BlockTable).is_some() {
        kinds.push(format!("cache of {} axes", case.arguments.key[0].shape().len()));
    }
    kinds
}

fn cases(folder: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(folder).unwrap();
    let mut files: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|is| is == "safetensors"));
    files.sort();
    files
}

#[test]
fn typed_calls_give_the_bits_of_calls_by_name() {
    let stream = harness::stream();
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors");
    let roots = [Some(own), env::var_os("ASCEND_VECTORS").map(PathBuf::from)];
    let mut seen = BTreeSet::new();
    for root in roots.into_iter().flatten() {
        for path in ["numeric", "quantised"].iter().flat_map(|part| cases(&root.join(part))) {
            let case = Case::read(&path).unwrap().attention().unwrap();
            if case.expect != Expect::Ok {
                continue;
            }
            let by_name = case.launch(&stream).unwrap();
            assert!(matches!(by_name.verdict, Verdict::Passed), "{path:?}");
            let dtype = by_name.output("attention_out").unwrap().dtype();
            let typed = match dtype {
                DType::Float16 => by_type::<f16>(&stream, &case),
                DType::Bf16 => by_type::<bf16>(&stream, &case),
                DType::Int8 => by_type::<i8>(&stream, &case),
                other => panic!("{path:?}: {other}"),
            };
            let named = ["attention_out", "softmax_lse"].map(|name| {
                let tensor = by_name.output(name);
                tensor.map(|tensor| tensor.bytes().to_vec())
            });
            assert!(typed == named, "{path:?}: other bits");
            seen.extend(kinds(&case));
        }
    }
    println!("{seen:?}");
    // What the repository's own cases have to cover.
    for kind in [
        "block_table",
        "query_rope",
        "key_shared_prefix",
        "query_padding_size",
        "kv_padding_size",
        "pse_shift",
        "quant_scale1",
        "quant_scale2",
        "quant_offset2",
        "mode 0",
        "mode 1",
        "modes 0 0",
        "modes 1 1",
        "modes 2 2",
        "modes 3 3",
        "modes 5 5",
        "modes 0 1",
        "key_antiquant_offset",
        "antiquant_offset",
        "list",
        "cache of 3 axes",
    ] {
        assert!(seen.contains(kind), "no case has {kind}: {seen:?}");
    }
}
