//! Captured launches of the operators beside FusedInferAttentionScore: a replay computes what a launch would, with
//! what the tensors hold then.

use crate::harness;

use ascend_attention::attention::{BlockTable, Inputs};
use ascend_attention::flash::{
    Dropout, FlashAttention, FlashInputs, FlashOutput, FlashPlan, InputLayout,
};
use ascend_attention::gather::{GatherPaKvCache, GatherPlan, SequenceBlocks};
use ascend_attention::incre::{IncreFlashAttention, IncrePlan};
use ascend_attention::prompt::{PromptFlashAttention, PromptPlan};
use ascend_attention::ring::{RingPlan, RingUpdate};
use ascend_attention::{Error, Graph, Layout, Stream, Tensor, f16};
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
        // Rows, batch and hidden size: of one entry they lie as batch, rows and hidden size do.
        let as_batch = |tensor: &Tensor<f16>| tensor.reshape([1, ROWS, DIM]).unwrap();
        let prompt = PromptFlashAttention::new(Layout::Bsh).scale(0.125);
        let (q, k) = (as_batch(&query), as_batch(&near));
        let prompt = prompt.plan((&q, &k, &k)).unwrap();
        let incre = IncreFlashAttention::new(Layout::Bsh).scale(0.125);
        let paged = Inputs::new(&row, &cache, &cache).paged(&table);
        let incre = incre.actual_seq_lengths_kv([20, 31]).plan(&paged);
        let flash = FlashAttention::new(InputLayout::Sbh).scale(0.125);
        let dropping = FlashInputs::new(&query, &near, &near).dropout(&dropout);
        let flash = flash.plan(&dropping).unwrap();
        let parts = [(); 3].map(|()| flash.output().unwrap());
        let ring = RingUpdate::new().plan(stream, &parts[0], &parts[1]);
        let caches = cache.reshape([4, BLOCK, 1, DIM]).unwrap();
        let sequences = SequenceBlocks::new(stream, &[[2, 0], [1, 3]], &[20, 31], 4, BLOCK);
        let gather = GatherPaKvCache::new();
        let gather = gather.plan(&sequences.unwrap(), &caches, &caches).unwrap();
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
        let plans = Plans {
            prompt,
            incre: incre.unwrap(),
            flash,
            ring: ring.unwrap(),
            gather,
        };
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
        outputs
            .map(|output| output.download(stream).unwrap())
            .to_vec()
    }

    /// What launches into new tensors compute.
    fn eager(&self, plans: &Plans, stream: &Stream) -> Vec<Vec<f16>> {
        let [q, k] = self.of_prompt();
        let prompt = plans.prompt.launch(stream, (&q, &k, &k)).unwrap();
        let paged = Inputs::new(&self.row, &self.cache, &self.cache).paged(&self.table);
        let incre = plans.incre.launch(stream, &paged).unwrap();
        let caches = self.caches();
        let (gathered, _) = plans.gather.launch(stream, &caches, &caches).unwrap();
        let [near, far] = [&self.near, &self.far].map(|keys| {
            let inputs = FlashInputs::new(&self.query, keys, keys).dropout(&self.dropout);
            plans.flash.launch(stream, &inputs).unwrap()
        });
        let merged = plans.ring.launch(stream, &near, &far).unwrap();
        let outputs: [Tensor<f16>; 4] = [prompt, incre, gathered, merged.attention];
        outputs
            .map(|output| output.download(stream).unwrap())
            .to_vec()
    }
}

fn captured(stream: &Stream, buffers: Buffers, plans: &Plans) -> Graph<Buffers> {
    let record = |capture: &ascend_attention::graph::Capturing<'_>, buffers: &Buffers| {
        let [q, k] = buffers.of_prompt();
        plans
            .prompt
            .launch_into(capture, (&q, &k, &k), &mut buffers.prompt.clone())?;
        let paged = Inputs::new(&buffers.row, &buffers.cache, &buffers.cache);
        let paged = paged.paged(&buffers.table);
        plans
            .incre
            .launch_into(capture, paged, &mut buffers.incre.clone())?;
        let (caches, [mut keys, mut values]) = (buffers.caches(), buffers.gathered.clone());
        plans
            .gather
            .launch_into(capture, &caches, &caches, &mut keys, &mut values)?;
        let [mut near, mut far, mut merged] = buffers.parts.clone();
        for (keys, part) in [(&buffers.near, &mut near), (&buffers.far, &mut far)] {
            let inputs = FlashInputs::new(&buffers.query, keys, keys).dropout(&buffers.dropout);
            plans.flash.launch_into(capture, &inputs, part)?;
        }
        plans.ring.launch_into(capture, &near, &far, &mut merged)
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
        for (tensor, seed) in [&buffers.query, &buffers.near, &buffers.cache]
            .into_iter()
            .zip(seed..)
        {
            tensor
                .overwrite(&stream, &halves(seed, tensor.len()))
                .unwrap();
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
        Err(Error::NotAsPlanned {
            argument, given, ..
        }) => {
            assert_eq!(argument, "output");
            assert!(given.contains("[4, 8]"), "{given}");
        }
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("captured"),
    }
    let [near, far, _] = &buffers.parts;
    let refused = Graph::capture(stream.device(), (), |capture, ()| {
        plans.ring.launch_into(capture, near, far, &mut output)
    });
    assert!(matches!(
        refused,
        Err(Error::NotAsPlanned {
            argument: "merged",
            ..
        })
    ));
    still_works(&stream);
}
