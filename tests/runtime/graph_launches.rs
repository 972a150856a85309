//! Captured launches of the operators beside FusedInferAttentionScore: a replay computes what a launch would, with
//! what the tensors hold then.

use crate::harness;

use ascend_attention::attention::{BlockTable, CallLengths, Inputs, PerRequest};
use ascend_attention::flash::{Dropout, FlashAttention, FlashInputs, FlashOutput, FlashPlan, InputLayout};
use ascend_attention::gather::{GatherPaKvCache, GatherPlan, SequenceBlocks};
use ascend_attention::graph::Capturing;
use ascend_attention::incre::{IncreFlashAttention, IncrePlan};
use ascend_attention::matmul::BatchMatMul;
use ascend_attention::merge::{MergeState, Part, PartsOfRows};
use ascend_attention::prompt::{PromptFlashAttention, PromptPlan};
use ascend_attention::ring::{RingPlan, RingUpdate};
use ascend_attention::scatter::{ScatterPaKvCache, SlotMapping};
use ascend_attention::{Error, FusedInferAttention, Graph, Layout, Output, Result, Stream, Tensor, f16, rules};
use harness::{halves, still_works};

const ROWS: usize = 6;
const DIM: usize = 64;
const BLOCK: usize = 16;

/// Tensors of one batch entry with one head, and a cache of two blocks for each of two sequences.
struct Buffers {
    query: Tensor<f16>,
    near: Tensor<f16>,
    far: Tensor<f16>,
    row: Tensor<f16>,
    cache: Tensor<f16>,
    table: BlockTable,
    dropout: Dropout,
    prompt: Tensor<f16>,
    incre: Tensor<f16>,
    parts: [FlashOutput<f16>; 3],
    gathered: [Tensor<f16>; 2],
}

struct Plans {
    prompt: PromptPlan,
    incre: IncrePlan,
    flash: FlashPlan,
    ring: RingPlan,
    gather: GatherPlan,
}

impl Buffers {
    fn new(stream: &Stream) -> (Self, Plans) {
        let of = |seed: u64, shape: [usize; 3]| {
            let data = halves(seed, shape.iter().product());
            stream.upload(&data, shape).unwrap()
        };
        let rows = |seed| of(seed, [ROWS, 1, DIM]);
        let (query, near, far) = (rows(1), rows(2), rows(3));
        let (row, cache) = (of(4, [2, 1, DIM]), of(5, [4, BLOCK, DIM]));
        let table = BlockTable::from_rows(stream, &[[2, 0], [1, 3]], BLOCK).unwrap();
        let keeps = (0..ROWS * ROWS).map(|bit| bit % 3 != 0);
        let dropout = Dropout::new(stream, keeps, 0.5).unwrap();
        // Rows, batch and hidden size: of one entry they have the strides of batch, rows and hidden size.
        let as_batch = |tensor: &Tensor<f16>| tensor.reshape([1, ROWS, DIM]).unwrap();
        let prompt = PromptFlashAttention::new(Layout::Bsh).scale(0.125);
        let (q, k) = (as_batch(&query), as_batch(&near));
        let prompt = prompt.plan((&q, &k, &k)).unwrap();
        let incre = IncreFlashAttention::new(Layout::Bsh).scale(0.125);
        let paged = Inputs::new(&row, &cache, &cache).paged(&table);
        let incre = incre.actual_seq_lengths_kv([20, 31]).plan(paged);
        let flash = FlashAttention::new(InputLayout::Sbh).scale(0.125);
        let dropping = FlashInputs::new(&query, &near, &near).dropout(&dropout);
        let flash = flash.plan(dropping).unwrap();
        let parts = [(); 3].map(|()| flash.output().unwrap());
        let ring = RingUpdate::new().plan(stream, (&parts[0], &parts[1]));
        let caches = cache.reshape([4, BLOCK, 1, DIM]).unwrap();
        let sequences = SequenceBlocks::new(stream, &[[2, 0], [1, 3]], &[20, 31], 4, BLOCK);
        let gather = GatherPaKvCache::new();
        let gather = gather.plan(&sequences.unwrap(), (&caches, &caches)).unwrap();
        let empty = |shape: [usize; 3]| Tensor::empty(stream.device(), shape).unwrap();
        let buffers = Self {
            prompt: empty([1, ROWS, DIM]),
            incre: empty([2, 1, DIM]),
            gathered: [(); 2].map(|()| empty([51, 1, DIM])),
            parts,
            query,
            near,
            far,
            row,
            cache,
            table,
            dropout,
        };
        let plans = Plans { prompt, incre: incre.unwrap(), flash, ring: ring.unwrap(), gather };
        (buffers, plans)
    }

    fn of_prompt(&self) -> [Tensor<f16>; 2] {
        [&self.query, &self.near].map(|tensor| tensor.reshape([1, ROWS, DIM]).unwrap())
    }

    fn caches(&self) -> Tensor<f16> {
        self.cache.reshape([4, BLOCK, 1, DIM]).unwrap()
    }

    /// What each output holds.
    fn outputs(&self, stream: &Stream) -> Vec<Vec<f16>> {
        let merged = &self.parts[2].attention;
        let outputs = [&self.prompt, &self.incre, &self.gathered[0], merged];
        outputs.map(|output| output.download(stream).unwrap()).to_vec()
    }

    /// What launches into new tensors compute.
    fn eager(&self, plans: &Plans, stream: &Stream) -> Vec<Vec<f16>> {
        let [q, k] = self.of_prompt();
        let prompt = plans.prompt.launch(stream, (&q, &k, &k)).unwrap();
        let paged = Inputs::new(&self.row, &self.cache, &self.cache).paged(&self.table);
        let incre = plans.incre.launch(stream, paged).unwrap();
        let caches = self.caches();
        let (gathered, _) = plans.gather.launch(stream, (&caches, &caches)).unwrap();
        let [near, far] = [&self.near, &self.far].map(|keys| {
            let inputs = FlashInputs::new(&self.query, keys, keys).dropout(&self.dropout);
            plans.flash.launch(stream, inputs).unwrap()
        });
        let merged = plans.ring.launch(stream, (&near, &far)).unwrap();
        let outputs: [Tensor<f16>; 4] = [prompt, incre, gathered, merged.attention];
        outputs.map(|output| output.download(stream).unwrap()).to_vec()
    }
}

fn captured(stream: &Stream, buffers: Buffers, plans: &Plans) -> Graph<Buffers> {
    let record = |capture: &Capturing<'_>, buffers: &Buffers| {
        let [q, k] = buffers.of_prompt();
        plans.prompt.launch_into(capture, (&q, &k, &k), &mut buffers.prompt.clone())?;
        let paged = Inputs::new(&buffers.row, &buffers.cache, &buffers.cache);
        let paged = paged.paged(&buffers.table);
        plans.incre.launch_into(capture, paged, &mut buffers.incre.clone())?;
        let (caches, [keys, values]) = (buffers.caches(), buffers.gathered.clone());
        let gathered = &mut (keys, values);
        (plans.gather).launch_into(capture, (&caches, &caches), gathered)?;
        let [mut near, mut far, mut merged] = buffers.parts.clone();
        for (keys, part) in [(&buffers.near, &mut near), (&buffers.far, &mut far)] {
            let inputs = FlashInputs::new(&buffers.query, keys, keys).dropout(&buffers.dropout);
            plans.flash.launch_into(capture, inputs, part)?;
        }
        plans.ring.launch_into(capture, (&near, &far), &mut merged)
    };
    let (graph, ()) = Graph::capture(stream.device(), buffers, record).unwrap();
    graph
}

#[test]
fn replays_of_every_operator_compute_what_launches_do() {
    let stream = harness::stream();
    let (buffers, plans) = Buffers::new(&stream);
    let mut graph = captured(&stream, buffers, &plans);
    for seed in [20, 30] {
        let buffers = graph.buffers();
        for (tensor, seed) in [&buffers.query, &buffers.near, &buffers.cache].into_iter().zip(seed..) {
            tensor.overwrite(&stream, &halves(seed, tensor.len())).unwrap();
        }
        let want = buffers.eager(&plans, &stream);
        graph.launch(&stream, graph.update()).unwrap();
        let got = graph.buffers().outputs(&stream);
        assert!(got == want, "with contents of seed {seed}");
    }
    // The graph keeps what it captured.
    drop(plans);
    graph.launch(&stream, graph.update()).unwrap();
    stream.synchronize().unwrap();
    still_works(&stream);
}

#[test]
fn tables_of_captured_single_rows_are_looked_at_before_each_replay() {
    let stream = harness::stream();
    let (buffers, plans) = Buffers::new(&stream);
    let mut graph = captured(&stream, buffers, &plans);
    let table = &graph.buffers().table;
    let beyond = table.overwrite(&stream, &[[2, 4], [1, 3]]);
    assert!(matches!(beyond, Err(Error::Violation(of)) if of.rule.id == "block_table.range"));
    // 20 and 31 keys are in two blocks each.
    table.overwrite(&stream, &[vec![2, 0], vec![1]]).unwrap();
    let short = graph.launch(&stream, graph.update());
    assert!(matches!(short, Err(Error::Violation(of)) if of.rule.id == "block_table.row_short"));
    let table = &graph.buffers().table;
    table.overwrite(&stream, &[[3, 0], [1, 2]]).unwrap();
    let want = graph.buffers().eager(&plans, &stream).swap_remove(1);
    graph.launch(&stream, graph.update()).unwrap();
    let got = graph.buffers().incre.download(&stream).unwrap();
    assert_eq!(got, want);
}

#[test]
fn captured_states_are_of_the_rows_that_are_written() {
    let stream = harness::stream();
    let (buffers, plans) = Buffers::new(&stream);
    let packed: Tensor<f16> = Tensor::empty(stream.device(), [8, 1, DIM]).unwrap();
    let call = FlashAttention::new(InputLayout::Tnd).scale(0.125);
    let of = |ends: [usize; 2]| {
        let call = call.clone().actual_seq_lengths(ends);
        let call = call.actual_seq_lengths_kv(ends);
        call.plan((&packed, &packed, &packed)).unwrap()
    };
    let (plan, other) = (of([3, 8]), of([4, 8]));
    let mut output: FlashOutput<f16> = other.output().unwrap();
    let refused = Graph::capture(stream.device(), (), |capture, ()| {
        plan.launch_into(capture, (&packed, &packed, &packed), &mut output)
    });
    match refused {
        Err(Error::Violation(violation)) => {
            assert_eq!(violation.rule, &rules::PLAN_TENSORS);
            let given = violation.given;
            assert!(given.starts_with("output: ") && given.contains("[4, 8]"), "{given}");
        }
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("captured"),
    }
    let [near, far, _] = &buffers.parts;
    let refused =
        Graph::capture(stream.device(), (), |capture, ()| plans.ring.launch_into(capture, (near, far), &mut output));
    assert!(matches!(
        &refused,
        Err(Error::Violation(violation))
            if violation.rule.id == "plan.tensors"
                && violation.given.starts_with("merged: ")
    ));
    still_works(&stream);
}

/// A capture allocates nothing. The refusal says what to do, and fails the capture also where it is ignored.
#[test]
fn launches_that_make_their_outputs_are_refused_in_a_capture() {
    type Launch<'a> = (&'a str, Box<dyn Fn(&Capturing<'_>) -> Result<()> + 'a>);
    let stream = harness::stream();
    let (buffers, plans) = Buffers::new(&stream);
    let ([q, k], caches) = (buffers.of_prompt(), buffers.caches());
    let paged = Inputs::new(&buffers.row, &buffers.cache, &buffers.cache).paged(&buffers.table);
    let flash = FlashInputs::new(&buffers.query, &buffers.near, &buffers.near);
    let flash = flash.dropout(&buffers.dropout);
    let [near, far, _] = &buffers.parts;
    let fused = FusedInferAttention::new(Layout::Bsh).scale(0.125).heads(1);
    let fused = fused.softmax_lse(true).plan((&q, &k, &k)).unwrap();
    let part_outputs = [fused.output::<f16>().unwrap(), fused.output().unwrap()];
    let parts = part_outputs.each_ref().map(|of| Part::of(of).unwrap());
    let merge = MergeState::new(Layout::Bsh).plan(&parts).unwrap();
    let by_heads = part_outputs.each_ref().map(|of| Output {
        attention: of.attention.reshape([1, 1, ROWS, DIM]).unwrap(),
        softmax_lse: of.softmax_lse.clone(),
    });
    let by_heads = by_heads.each_ref().map(|of| Part::of(of).unwrap());
    let both = [PartsOfRows { rows: 1, parts: 0b11 }];
    let row_merge = MergeState::new(Layout::Bnsd).rows(&both).plan(&by_heads);
    let row_merge = row_merge.unwrap();
    let turned = q.reshape([1, DIM, ROWS]).unwrap();
    let product = BatchMatMul::new().plan((&q, &turned)).unwrap();
    let launches: [Launch<'_>; 9] = [
        ("fused", Box::new(|to| fused.launch(to, (&q, &k, &k)).map(drop))),
        ("prompt", Box::new(|to| plans.prompt.launch(to, (&q, &k, &k)).map(drop))),
        ("incre", Box::new(|to| plans.incre.launch(to, paged).map(drop))),
        ("flash", Box::new(|to| plans.flash.launch(to, flash).map(drop))),
        ("ring", Box::new(|to| plans.ring.launch(to, (near, far)).map(drop))),
        ("gather", Box::new(|to| plans.gather.launch(to, (&caches, &caches)).map(drop))),
        ("merge", Box::new(|to| merge.launch(to, &parts).map(drop))),
        ("rows", Box::new(|to| row_merge.launch(to, &by_heads).map(drop))),
        ("product", Box::new(|to| product.launch(to, (&q, &turned)).map(drop))),
    ];
    for (name, launch) in &launches {
        let captured = Graph::capture(stream.device(), (), |capture, ()| {
            let refused = launch(capture).unwrap_err();
            let text = refused.to_string();
            assert!(text.contains("`launch_into`"), "{name}: {text}");
            Ok(())
        });
        let ignored = captured.map(drop).unwrap_err();
        assert!(matches!(ignored, Error::Capturing { .. }), "{name}: {ignored}");
    }
    still_works(&stream);
}

/// A graph without the launch would replay something else than was meant.
#[test]
fn an_ignored_failure_of_any_operator_fails_the_capture() {
    type Launch<'a> = (&'a str, Box<dyn Fn(&Capturing<'_>) -> Result<()> + 'a>);
    let stream = harness::stream();
    let (buffers, plans) = Buffers::new(&stream);
    let ([q, k], caches) = (buffers.of_prompt(), buffers.caches());
    let wrong: Tensor<f16> = Tensor::empty(stream.device(), [2, ROWS, DIM]).unwrap();
    let [near, _, merged] = &buffers.parts;
    let other = FlashAttention::new(InputLayout::Sbh).scale(0.125).heads(1);
    let row = buffers.query.narrow(0, 0..1).unwrap();
    let other: FlashOutput<f16> = other.plan((&row, &row, &row)).unwrap().output().unwrap();
    let slots = SlotMapping::new(&stream, &[1, 2], 64).unwrap();
    let new = buffers.row.reshape([2, 1, DIM]).unwrap();
    let scatter = ScatterPaKvCache::new().plan((&new, &slots, &caches)).unwrap();
    let launches: [Launch<'_>; 7] = [
        ("prompt", Box::new(|to| plans.prompt.launch_into(to, (&q, &k, &wrong), &mut buffers.prompt.clone()))),
        ("incre", Box::new(|to| plans.incre.launch_into(to, (&q, &k, &k), &mut buffers.incre.clone()))),
        ("flash", Box::new(|to| plans.flash.launch_into(to, (&q, &k, &k), &mut near.clone()))),
        ("ring", Box::new(|to| plans.ring.launch_into(to, (near, &other), &mut merged.clone()))),
        (
            "gather",
            Box::new(|to| {
                let mut gathered = (wrong.clone(), wrong.clone());
                (plans.gather).launch_into(to, (&caches, &caches), &mut gathered)
            }),
        ),
        ("scatter", Box::new(|to| scatter.launch(to, (&wrong, &slots, &caches)))),
        ("copy", Box::new(|to| q.copy_from(to, &wrong))),
    ];
    for (name, launch) in &launches {
        let mut error = None;
        let captured = Graph::capture(stream.device(), (), |capture, ()| {
            error = launch(capture).err();
            Ok(())
        });
        let failed = captured.map(drop).unwrap_err();
        assert_eq!(Some(failed), error, "{name}");
    }
    still_works(&stream);
}

#[test]
fn a_capture_takes_launches_of_its_own_device() {
    let stream = harness::stream();
    if harness::not_on_npu("a machine may have one device") {
        return;
    }
    let elsewhere = stream.device().runtime().device(1).unwrap();
    let (buffers, plans) = Buffers::new(&stream);
    let [q, k] = buffers.of_prompt();
    for copies in [false, true] {
        let captured = Graph::capture(&elsewhere, (), |capture, ()| match copies {
            true => q.copy_from(capture, &k),
            false => {
                let mut output = buffers.prompt.clone();
                plans.prompt.launch_into(capture, (&q, &k, &k), &mut output)
            }
        });
        let error = captured.map(drop).unwrap_err();
        assert!(error.breaks(&rules::ARGUMENT_DEVICE), "{error}");
        assert!(error.to_string().contains("device 1"), "{error}");
    }
    still_works(&stream);
}

/// Lengths that nothing takes would be lengths that are not computed with.
#[test]
fn lengths_for_plans_that_keep_theirs_are_refused() {
    let stream = harness::stream();
    let (buffers, plans) = Buffers::new(&stream);
    let graph = captured(&stream, buffers, &plans);
    let keys = PerRequest::new(vec![21, 31]).unwrap();
    let lengths = CallLengths::Batched { q: None, kv: &keys };
    match graph.update().all(lengths) {
        Err(Error::Violation(refused)) => {
            assert_eq!(refused.rule, &rules::GRAPH_UPDATE);
            assert!(refused.fix.contains("Capturing::attention"), "{refused}");
        }
        other => panic!("{other:?}"),
    }
}

/// Merged, copied and empty rows.
#[test]
fn replays_of_row_merges_compute_what_launches_do() {
    let stream = harness::stream();
    let lse = |seed| {
        let numbers = harness::numbers(seed, ROWS);
        stream.upload(&numbers, [ROWS, 1, 1]).unwrap()
    };
    let attention = |seed| {
        let halves = halves(seed, ROWS * DIM);
        stream.upload(&halves, [ROWS, 1, DIM]).unwrap()
    };
    let outputs = [1, 2].map(|seed| Output { attention: attention(seed), softmax_lse: Some(lse(seed + 10)) });
    let parts = outputs.each_ref().map(|output| Part::of(output).unwrap());
    let rows = [(3, 0b11), (1, 0b10), (2, 0)].map(|(rows, parts)| PartsOfRows { rows, parts });
    let plan = MergeState::new(Layout::Tnd).rows(&rows).plan(&parts).unwrap();
    let merged = plan.output::<f16>().unwrap();
    let (mut graph, ()) = Graph::capture(stream.device(), merged, |capture, merged| {
        plan.launch_into(capture, &parts, &mut merged.clone())
    })
    .unwrap();
    for seed in [5, 6] {
        let fresh = halves(seed, ROWS * DIM);
        outputs[1].attention.overwrite(&stream, &fresh).unwrap();
        let want = plan.launch(&stream, &parts).unwrap();
        graph.launch(&stream, graph.update()).unwrap();
        let got = graph.buffers();
        let downloaded = |of: &Output<f16>| {
            let lse = of.softmax_lse.as_ref().unwrap();
            let attention = of.attention.download(&stream).unwrap();
            (attention, lse.download(&stream).unwrap())
        };
        assert_eq!(downloaded(got), downloaded(&want), "seed {seed}");
    }
}
