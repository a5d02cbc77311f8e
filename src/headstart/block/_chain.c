/* The chain of keys with the processor's own SHA-256 instructions: what a call for each block costs is several times the hashing.

   key[i] = SHA-256( key[i-1] | block i ), for blocks of 256 bytes that nothing else belongs to. x86-64 alone: elsewhere, and on
   processors without the instructions, `headstart_chain` hashes nothing and says so, and hashlib does it. No Python.h: one build
   serves every interpreter. */

#include <stdint.h>
#include <string.h>

#define BLOCK_BYTES 256
#define KEY_BYTES 32
#define PADDED_BYTES 320 /* a key, a block, 0x80, zeros, the length in bits: five times 64 */

#if defined(__x86_64__) && defined(__GNUC__)

#include <cpuid.h>
#include <immintrin.h>

static const uint32_t round_constants[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static int has_instructions(void)
{
    static int known; /* 1: it has not, 2: it has. Asking leaves a virtual machine, which takes microseconds. */
    if (!known) {
        unsigned a, b, c, d;
        int has = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_1) && (c & bit_SSSE3);
        known = has && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1) /* SHA */ ? 2 : 1;
    }
    return known == 2;
}

__attribute__((target("sha,sse4.1,ssse3"))) static void hash(const uint8_t *padded, uint8_t *key)
{
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    /* The instructions want the state as ABEF and CDGH. */
    __m128i abcd = _mm_loadu_si128((const __m128i *)start), efgh = _mm_loadu_si128((const __m128i *)(start + 4));
    __m128i cdab = _mm_shuffle_epi32(abcd, 0xB1), hgfe = _mm_shuffle_epi32(efgh, 0x1B);
    __m128i abef = _mm_alignr_epi8(cdab, hgfe, 8), cdgh = _mm_blend_epi16(hgfe, cdab, 0xF0);
    for (const uint8_t *at = padded; at < padded + PADDED_BYTES; at += 64) {
        __m128i abef_before = abef, cdgh_before = cdgh, word[4];
        for (int i = 0; i < 4; i++)
            word[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(at + 16 * i)), big_endian);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m128i sum = _mm_add_epi32(word[i & 3], _mm_load_si128((const __m128i *)(round_constants + 4 * i)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
            if (i < 12) {
                __m128i middle = _mm_alignr_epi8(word[(i + 3) & 3], word[(i + 2) & 3], 4);
                __m128i next = _mm_add_epi32(_mm_sha256msg1_epu32(word[i & 3], word[(i + 1) & 3]), middle);
                word[i & 3] = _mm_sha256msg2_epu32(next, word[(i + 3) & 3]);
            }
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
    abcd = _mm_blend_epi16(feba, dchg, 0xF0);
    efgh = _mm_alignr_epi8(dchg, feba, 8);
    _mm_storeu_si128((__m128i *)key, _mm_shuffle_epi8(abcd, big_endian));
    _mm_storeu_si128((__m128i *)(key + 16), _mm_shuffle_epi8(efgh, big_endian));
}

/* Writes the key of each of `blocks` to `keys`, the first one's before it being `root`; returns 0 where nothing was done. */
int headstart_chain(const uint8_t *root, const uint8_t *data, int64_t blocks, uint8_t *keys)
{
    if (!has_instructions())
        return 0;
    uint8_t padded[PADDED_BYTES] = {0};
    padded[KEY_BYTES + BLOCK_BYTES] = 0x80;
    padded[PADDED_BYTES - 2] = (KEY_BYTES + BLOCK_BYTES) * 8 >> 8;
    padded[PADDED_BYTES - 1] = (KEY_BYTES + BLOCK_BYTES) * 8 & 0xff;
    for (int64_t i = 0; i < blocks; i++, root = keys, keys += KEY_BYTES) {
        memcpy(padded, root, KEY_BYTES);
        memcpy(padded + KEY_BYTES, data + i * BLOCK_BYTES, BLOCK_BYTES);
        hash(padded, keys);
    }
    return 1;
}

#else

int headstart_chain(const uint8_t *root, const uint8_t *data, int64_t blocks, uint8_t *keys)
{
    (void)root, (void)data, (void)blocks, (void)keys;
    return 0;
}

#endif
