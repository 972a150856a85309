//! The rules of FusedCausalConv1d and of its in-place form.
//!
//! Some conditions that the sources of 9.1 leave to the caller are rules here, with the status that later sources or
//! the documents give them, since what the kernel does otherwise is not known: windows of other widths in calls of few
//! rows, strides, prefix caching without one of its tensors, blocks of 1 token, and a pool of fewer lines than
//! sequences.

use super::Version;
use crate::rule::rules;

rules! {
    in Scope::ASCEND_950.since_on_950(V9_1);
    PRODUCT = "fused_conv.product", FIND_KERNEL_ERROR, V1, "FusedCausalConv1d documentation, products" in Scope::ALL,
        "the product has the operator in the release",
        "run on Ascend 950 with CANN 9.1 or newer, or convolve by CausalConv1d of vLLM-Ascend's package";
    UNCHECKED_NULL = "fused_conv.unchecked_null", NullptrCrash("the library reads through the pointer"), V1,
        "FusedCausalConv1d API, x, weight and convStates" in Scope::ASCEND_950.since_on_950(V9_1).until_on_950(V9_1),
        "x, weight and convStates are given in 9.1",
        "pass rows, weights and a pool of lines";
    REQUIRED = "fused_conv.required", PARAM_NULLPTR, V1, "FusedCausalConv1d API, null pointers",
        "x, weight, convStates and y are given",
        "pass rows, weights, a pool of lines and an output";
    MODE = "fused_conv.mode", TILING_ERROR, V1, "FusedCausalConv1d documentation, attributes",
        "residualConnection and convMode are 0 or 1",
        "pass residualConnection 1 to add each row to its sum, and convMode 1 to make sums zero whose windows begin in "
        "front of the sequence";
    UNREAD_MODE = "fused_conv.unread_mode", TILING_ERROR, V1, "FusedCausalConv1d tiling, attributes"
        in Scope::ASCEND_950.since_on_950(V9_2),
        "from 9.2 on activationMode is 0, 1 or 2, and runMode 0 or 1, though nothing reads them",
        "pass 0";
    DTYPE = "fused_conv.dtype", TILING_ERROR, V1, "FusedCausalConv1d tiling, dtypes",
        "x, weight, bias, convStates and y are all FLOAT16 or all BF16, the others INT32",
        "convert the named tensor to one of the allowed dtypes";
    format of "fused_conv", TILING_ERROR, "FusedCausalConv1d definition, formats";
    RANK = "fused_conv.rank", TILING_ERROR, V1, "FusedCausalConv1d tiling, ranks",
        "x has 2 or 3 axes, weight 2, convStates 3, the other tensors 1, and cacheIndices 2 with blocks",
        "describe the tensor with as many axes";
    STRIDES = "fused_conv.strides", TILING_ERROR, V1, "FusedCausalConv1d tiling, strides",
        "the elements of a row stand next to each other, rows of x at equal distances, rows that are written apart \
         from each other, and y is contiguous",
        "copy to a tensor whose rows are whole; rows of x and convStates may have gaps between them";
    CHANNELS = "fused_conv.channels", TILING_ERROR, V1, "FusedCausalConv1d tiling, dim",
        "a row has a multiple of 16 elements up to 16384, at least 64 with maxQueryLen 1 to 8 or x [B, L, dim]",
        "pad the channels of rows, weights and lines, or divide them over calls";
    WIDTH = "fused_conv.width", TILING_ERROR, V1, "FusedCausalConv1d tiling, weight",
        "a window has 3 rows",
        "pass weights [3, channels], transposed from a model's [channels, 3]; zero-pad those of 2 rows in front, and \
         for 4 rows use CausalConv1d of vLLM-Ascend's package";
    SHAPE = "fused_conv.shape", TILING_ERROR, V1, "FusedCausalConv1d tiling, shapes",
        "weight, bias, convStates and y have the channels of x, y its shape, and the tensors of numbers the sequences \
         of the call",
        "give tensors of the same rows, channels and sequences";
    SEQUENCES = "fused_conv.sequences", TILING_ERROR, V1, "FusedCausalConv1d tiling, batch",
        "a call has 1 to 256 sequences",
        "divide the sequences over calls, and leave the call out where there are none";
    ROWS = "fused_conv.rows", TILING_ERROR, V1, "FusedCausalConv1d tiling, x",
        "x [T, dim] has 1 to 1048576 rows, and x [B, L, dim] 1 to 8 of each sequence",
        "leave the call out where there is no row, pass longer sequences as x [T, dim] with queryStartLoc, and divide "
        "more rows over calls";
    STARTS = "fused_conv.starts", TILING_ERROR, V1, "FusedCausalConv1d tiling, queryStartLoc",
        "queryStartLoc is given with x [T, dim]",
        "give the number of each sequence's first row, and behind them that of all rows";
    MOST_ROWS = "fused_conv.max_query_len", TILING_ERROR, V1, "FusedCausalConv1d tiling, maxQueryLen"
        in Scope::ASCEND_950.since_on_950(V9_2),
        "from 9.2 on maxQueryLen is positive with x [T, dim], and the sequences have room for all rows with it",
        "pass the rows of the longest sequence";
    LINES = "fused_conv.lines", TILING_ERROR, V1, "FusedCausalConv1d documentation, convStates",
        "there are lines, without cacheIndices one for each sequence",
        "give the pool a line for each sequence, or say by cacheIndices which lines are meant";
    LINE_ROWS = "fused_conv.line_rows", TILING_ERROR, V1, "FusedCausalConv1d tiling, convStates",
        "a line has at least 2 rows, with x [B, L, dim] at least L + 1",
        "make the pool with longer lines";
    COMPUTED = "fused_conv.computed", TILING_ERROR, V1, "FusedCausalConv1d tiling, numComputedTokens",
        "numComputedTokens is given with convMode 1, and with blocks",
        "give the tokens in front of each sequence's rows";
    BLOCK_SIZE = "fused_conv.block_size", TILING_ERROR, V1, "FusedCausalConv1d tiling, blockSize",
        "a block has at least 2 tokens",
        "pass the tokens of a block, such as 128";
    BLOCKS = "fused_conv.blocks", TILING_ERROR, V1, "FusedCausalConv1d tiling, prefix caching",
        "blockIdxFirstScheduledToken, blockIdxLastScheduledToken, initialStateIdx and cacheIndices [B, blocks] are \
         given together",
        "give all four for prefix caching, and otherwise cacheIndices [B] alone";
    UNREAD = "fused_conv.unread", Lint("nothing is computed with it"), V1, "FusedCausalConv1d kernel, arguments",
        "bias, initialStateMode and, of x [B, L, dim], queryStartLoc are null, and activationMode and runMode 0: the \
         operator takes them and does not read them",
        "leave it out: say by numComputedTokens 0 which sequences begin, and add a bias or apply an activation behind \
         the call";
    PAD_SLOT = "fused_conv.pad_slot", Lint("other sequences are left out, or none"), V1,
        "FusedCausalConv1d kernel, padSlotId",
        "padSlotId is -128 to 127 with maxQueryLen 1 to 8 or x [B, L, dim], whose kernel reads its lowest 8 bits",
        "pass -1 as padSlotId, and -1 in cacheIndices for each sequence that is left out";
    CONTENTS = "fused_conv.contents", Overrun("rows of other memory are read or written"), V1,
        "FusedCausalConv1d kernel",
        "queryStartLoc begins with 0, does not decrease and ends with the rows of x, no sequence has more rows than \
         maxQueryLen says, lines are those of the pool, accepted counts those of a line's \
         rows, and blocks those with the first and the last row",
        "make starts, lines, counts and blocks from one batch";
    LEFT_OUT = "fused_conv.left_out", Lint("what is computed of the others is not known"), V1,
        "FusedCausalConv1d documentation, queryStartLoc and padSlotId",
        "each sequence has rows, and those that are left out are the first or the last ones",
        "leave sequences without rows out of the call, and put those of padding at the end";
    SHARED = "fused_conv.shared_line", Lint("a sequence may read a line before or after another one writes it"), V1,
        "FusedCausalConv1d kernel, cacheIndices",
        "a line that a sequence writes is not written for another block, and no other sequence reads or writes it",
        "give each sequence and each block a line of its own; lines that sequences share are read only";
}
