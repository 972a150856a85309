//! The rules and lints of ATB's attention.

use super::Version;
use crate::rule::rules;

rules! {
    in Scope::ALL;
    GIVEN = "atb.given", ATB_INVALID_TENSOR_NUM, Paged, "ATB atb_ops_info.ini",
        "every tensor of the operator is given",
        "give the tensors in the order of the operator's documents";
    PRODUCT = "atb.product", ATB_INVALID_PARAM, Paged, "ATB DeviceParamCheck, PrefixEncoderParamCheck",
        "keys are in a cache and have several query rows (PREFIX_ENCODER) on Atlas A2 and A3 alone",
        "give PagedAttention one row a sequence, or SelfAttention keys that are in no cache (PA_ENCODER)";
    PREFIX = "atb.prefix", ATB_INVALID_PARAM, Prefix, "ATB PrefixEncoderParamCheck",
        "PREFIX_ENCODER has isTriuMask 1, kernelType 1 (high precision), outDataType -1 and no clamp, also not by \
         clampMin and clampMax",
        "make the operation with the values that PREFIX_ENCODER has";
    TRIANGLE = "atb.triangle", ATB_INVALID_PARAM, Packed, "ATB CreateOperation",
        "isTriuMask is 1 only with a mask (maskType)",
        "give a maskType, or set isTriuMask to 0";
    DTYPE = "atb.dtype", ATB_INVALID_TENSOR_DTYPE, Paged, "ATB atb_ops_info.ini",
        "query, key, value, mask and attnOut are of one type, FLOAT16 or BF16, and blockTables is INT32",
        "convert the tensor";
    FORMAT = "atb.format", ATB_INVALID_TENSOR_FORMAT, Paged, "ATB atb_ops_info.ini",
        "tensors are in the format ND, and caches on 310P in FRACTAL_NZ",
        "convert the tensor to the format";
    HEADS = "atb.heads", ATB_INVALID_PARAM, Paged, "ATB CommonParamCheck, HeadNumCheck",
        "headNum is more than 0, and kvHeadNum 0 or a divisor of it",
        "give the numbers of heads of the model";
    SCALE = "atb.scale", ATB_INVALID_PARAM, Paged, "ATB Ascend950ParamCheck",
        "on Ascend 950 qkScale of PagedAttention is more than 0 and at most 1",
        "give the scale 1 / sqrt(head dimension), and scale the query by what is left";
    QUERY = "atb.query", ATB_INVALID_TENSOR_DIM, Paged, "ATB SetupDimCheck, InferShapePADimCheck",
        "query has headNum heads and attnOut its tokens, heads and the head dimension of value",
        "describe the tensor as [tokens, N, D], for SelfAttention perhaps as [tokens, N * D]";
    KEYS = "atb.keys", ATB_INVALID_TENSOR_DIM, Paged, "ATB KVCacheDimCheck, InferShapePADimCheck",
        "key and value have kvHeadNum heads, key the head dimension of query, and both have the same tokens or \
         blocks",
        "describe keys and values in the order that the operator has on the product";
    HEAD_SIZE = "atb.head_size", ATB_INVALID_TENSOR_DIM, Paged,
        "ATB KVCacheDimCheck910B, KVCacheDimCheck310P, InferShapePrefixDimCheck910B",
        "head dimensions are at most 576, and above 256 for caches with blocks of at most 128 tokens; on 310P at \
         most 256, a multiple of 16, and block size times head dimension at most 16384; of PREFIX_ENCODER one for \
         keys and values, at most 128, a multiple of 16, in blocks of 128 tokens",
        "make the blocks smaller; no call of the operator computes longer heads";
    LENGTHS = "atb.lengths", ATB_INVALID_PARAM, Paged, "ATB BuildFromTensor, kernel tiling",
        "there is one length for each sequence, none is negative, and their rows are in the tensors",
        "give lengths that the tensors hold";
    LENGTH_PAIRS = "atb.length_pairs", ATB_INVALID_PARAM, Packed, "ATB kernel tiling, CheckSeqlen",
        "on Atlas A2 and A3 a sequence of PA_ENCODER has as many keys as query rows, or one row, and with kernelType \
         1 more than 0 of both; one of PREFIX_ENCODER has a multiple of 128 keys before its rows",
        "make the sequences so; for PREFIX_ENCODER count tokens behind the last whole block of 128 among the rows";
    TABLE = "atb.table", ATB_INVALID_TENSOR_DIM, Paged, "ATB PagedAttention documentation, blockTables",
        "blockTables is [sequences, blocks], and a row names the blocks of all keys of its sequence",
        "give each sequence a row with all its blocks";
    MASK = "atb.mask", ATB_INVALID_TENSOR_DIM, Paged, "ATB kernel tiling, CheckMask, CheckNdMask, NormMaskDimCheck",
        "a mask is [rows, keys] or [sequences, rows, keys] and covers the most rows and the most keys, of which \
         there are no fewer; one of maskType 3 is [128, 128], and stands for longer sequences with isTriuMask 1",
        "make the mask anew for the longest sequence";
    ROWS = "atb.rows", Lint("rows behind those of the lengths are not written"), Paged, "ATB kernel tiling",
        "query has no more rows than the lengths name",
        "give a length for each sequence, or leave the rows away: what attnOut held there stays";
    SKIPPED_KEYS = "atb.skipped_keys", Overrun("the loop over keys ends by the row, also where there are fewer keys"),
        Packed, "ATB kernel",
        "with isTriuMask 1 a sequence of PA_ENCODER has as many keys as query rows",
        "set isTriuMask to 0, with a mask for all rows and keys: rows and keys are compared from the first on";
    SQUARES = "atb.squares", Lint("the first square is read for all sequences"), Packed, "ATB kernel",
        "a mask whose rows have 128 numbers is one square for all sequences where isTriuMask is 1",
        "set isTriuMask to 0, or give one square";
}
