-- Whether whoever opens a store here may, by the secrets it knows: those that others use are named
-- under the key, 64 characters each, by a hash that does not tell them.
--
-- KEYS[1]  the names
-- ARGV[1]  the name of the secret that is in force
-- ARGV[2…] of earlier ones
local known = redis.pcall('GET', KEYS[1])
if type(known) == 'table' then
  return redis.error_reply('HAPAX ' .. known.err)
end
if known and string.find(known, ARGV[1], 1, true) then
  return 1
end
-- The first to come, or one who knows another that is in use.
local may = not known
for at = 2, #ARGV do
  may = may or string.find(known, ARGV[at], 1, true) ~= nil
end
if not may then
  return 0
end
local done = redis.pcall('SET', KEYS[1], (known or '') .. ARGV[1])
if done.err then
  return redis.error_reply('NOTWRITTEN ' .. done.err)
end
return 1
